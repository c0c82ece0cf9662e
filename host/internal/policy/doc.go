// Package policy runs the decisions that kvhost delegates: which entries are evicted, which are stored, what their
// files are called and how their bytes are ordered.
//
// The rest of the host asks a [Module] for an [Evict], [Admit], [Place] or [Layout] and never learns whether
// WebAssembly or native Go answers. Package sandbox runs the WebAssembly; this package judges the answers, supervises
// the guests and provides the built-in policies. abi/SPEC.md is the contract. The rest of this comment explains the
// decisions.
//
// # Events are written to a queue of the host
//
// [Evict.Event] is small enough to be inlined and costs about 3 ns. Several batches are delivered together, because a
// call made long after the last one finds neither its code nor the policy's tables in the CPU caches and costs 20 times
// as much.
//
// # A module is tested when it is loaded
//
// A module that cannot do its job is best refused while the operator watches, with a reason, and not by its first
// fault. The self-test (selftest.go) makes an instance of each role do a little of everything; it costs about two
// starts of an instance, 3 to 4 ms for one in Go, at each load.
//
// # A signature is a file next to the module, or in its artefact
//
// A section inside would have to be excluded from what is signed, and no tool would verify it. The tools minisign and
// cosign sign any file, cosign also what is in a registry: an artefact in a directory has those signatures with it. The
// host only verifies.
//
// # A state is tried once
//
// A state may come from another module, or be damaged. A guest that traps while it loads one has done nothing wrong: it
// is discarded with the state, and another instance starts empty and gets what is resident.
package policy
