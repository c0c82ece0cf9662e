//go:build !wasip1

package abi

import "embed"

// Sources are the kits for policies, as a host hands them out: this package and the Go kit, C's header and Rust's crate,
// each in its directory. Guests do not embed them.
//
//go:embed *.go guest c/kvhost.h c/kvhost.mk rust/Cargo.toml rust/kvhost.mk rust/src
var Sources embed.FS
