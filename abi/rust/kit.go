// Package rustkit holds the kit for policies in Rust: a crate, so that a host can hand it out.
package rustkit

import "embed"

// Files are the kit's, as a project of a vendor's has them.
//
//go:embed Cargo.toml kvhost.mk src
var Files embed.FS
