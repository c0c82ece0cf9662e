// Package abi is the contract between kvhost and a policy module: version 1.
//
// The one idea: a policy is a core WebAssembly module that is handed batches of fixed-size little-endian records in
// buffers it owns, and answers in records of its own. Numbers only, one crossing per batch, no allocator exports. The
// host keeps the truth (what is resident, how many bytes, which file); the guest keeps soft state that the host can
// rebuild at any time by replaying what is resident.
//
// Every record here is a Go struct whose memory layout on a little-endian machine *is* the wire layout (explicit
// padding, natural alignment), so a Go guest and the host read a batch without decoding it. The golden tests pin each
// offset. SPEC.md says the same for readers who write no Go.
//
// The package imports nothing of kvhost and is linked into guests: keep it small.
package abi
