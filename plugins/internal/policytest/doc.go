// Package policytest tests eviction policies natively.
//
// It drives a policy as the host does (ask for victims, then removals, then the insert) and checks each answer against
// something simpler. [Compare] checks it against a reference implementation: the algorithm as its paper gives it, with
// maps and lists, deciding at the access. [Abuse] checks it against the contract: entries of many sizes and tenants, pins,
// victims that stay, unexpected removals.
package policytest
