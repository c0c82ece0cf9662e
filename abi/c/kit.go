// Package ckit holds the kit for policies in C: one header, so that a host can hand it out.
package ckit

import "embed"

// Files are the kit's, as a project of a vendor's has them.
//
//go:embed kvhost.h kvhost.mk
var Files embed.FS
