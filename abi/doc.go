// Package abi is the contract between kvhost and a policy module: version 1.
//
// A policy is a core WebAssembly module. It gets batches of fixed-size little-endian records in buffers that it owns, and
// answers with records. A batch costs one call; there are no allocator exports. The host holds the truth (what is
// resident, how many bytes, which file). The guest holds soft state, which the host can rebuild at any time by replaying
// the resident entries.
//
// Every record is a Go struct, and its memory layout on a little-endian machine is the wire layout (explicit padding,
// natural alignment), so a Go guest and the host read a batch without decoding it. Golden tests pin each offset. SPEC.md
// describes the same contract for other languages.
//
// The package imports nothing of kvhost and is linked into guests: keep it small.
package abi
