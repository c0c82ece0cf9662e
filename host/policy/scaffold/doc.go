// Package scaffold writes the project of a new policy: a directory that builds, and passes `kvhost policy check` as it
// stands.
//
// The one idea: a project depends on nothing that its author has to find. The kit for its language is copied into it,
// as this host has it, so it builds without a network and speaks the ABI of the host that made it. The policy in it is
// a small one that is complete, with everything the contract wants of an eviction policy (pins, tenants, a bound on
// what one answer looks at), to be changed rather than filled in.
package scaffold
