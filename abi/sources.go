//go:build !wasip1

package abi

import "embed"

// Sources holds the kits that a host copies into policy projects: this package, the Go kit, the C header and the Rust crate,
// each in its directory. Guests do not embed them.
//
//go:embed *.go guest c/kvhost.h c/kvhost.mk rust/Cargo.toml rust/kvhost.mk rust/src
var Sources embed.FS
