// Package policytest tests eviction policies natively.
//
// The one idea: a policy is driven as the host drives it (victims asked for, then removals, then the insert), and each
// answer is held against something simpler. [Compare] holds it against a textbook: the algorithm as its paper has it,
// with maps and lists, deciding at the access. [Abuse] holds it against the contract: entries of many sizes and tenants, pins, victims
// that stay, removals that nobody asked for.
package policytest
