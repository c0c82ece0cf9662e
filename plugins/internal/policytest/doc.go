// Package policytest tests eviction policies natively, and has tests only. It drives a policy as the host does (ask for
// victims, then removals, then the insert), and compares each answer with that of the algorithm as its paper gives it, with
// maps and lists, deciding at the access.
package policytest
