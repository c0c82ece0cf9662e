// Package policy runs the decisions that kvhost delegates: the entries to evict, the entries to store, the names of
// files, and the order of their bytes.
//
// The rest of the host asks a [Module] for an [Evict], [Admit], [Place] or [Layout], and does not depend on whether
// WebAssembly or native Go answers. Package sandbox runs the WebAssembly; this package judges the answers, supervises
// the guests and provides the built-in policies. abi/SPEC.md is the contract. The rest of this comment explains the
// decisions.
//
// # Events are written to a queue of the host
//
// [Evict.Event] is small enough to be inlined and costs about 3 ns. Several batches are delivered together: a call long
// after the last one finds neither its code nor the policy's tables in the CPU caches, and costs 20 times as much.
//
// # A module is tested when it is loaded
//
// A module that does not work is refused at load, with a reason, while the operator watches. The self-test
// (selftest.go) gives an instance of each role a small amount of all its work. It costs about two starts of an instance
// at each load, 3 to 4 ms for one in Go.
//
// # A signature is a file next to the module, or in its artefact
//
// A signature in a section would have to exclude that section, and no tool would verify it. minisign and cosign sign
// any file, and cosign also signs artefacts in a registry; an artefact in a directory contains those signatures. The
// host only verifies.
//
// # A state is tried once
//
// A state may come from another module, or be damaged. So a trap while a guest loads a state is no fault: the guest is
// discarded with the state, and another instance starts empty and gets the resident entries.
package policy
