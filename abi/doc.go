// Package abi is the contract between kvhost and a policy module: version 1.
//
// A policy is a core WebAssembly module. It receives batches of fixed-size little-endian records in buffers that it owns, and
// answers with records. A batch costs one call, and there are no allocator exports. The host is the authority on the resident
// entries, their bytes and their files. The guest holds soft state, which the host can rebuild at any time by replaying the
// resident entries.
//
// Every record is a Go struct with explicit padding and natural alignment. Its memory layout on a little-endian machine is the
// wire layout, so a Go guest and the host read a batch without decoding it. Golden tests pin each offset. SPEC.md describes the
// same contract for other languages.
//
// The package imports nothing of kvhost. It is linked into guests, so keep it small.
package abi
