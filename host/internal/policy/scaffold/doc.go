// Package scaffold writes the project of a new policy: a directory that builds and passes `kvhost policy check`
// unchanged.
//
// The project has no dependency that its author must find. The kit for its language is copied into it from this host,
// so it builds without a network and uses the ABI of the host that made it. Its policy is small but complete, with
// everything that the contract requires of an evict policy (pins, tenants, a bound on the work of one answer). It is
// meant to be changed rather than filled in.
package scaffold
