// Package askit holds the kit for policies in AssemblyScript: a package, so that a host can hand it out.
package askit

import "embed"

// Files are the kit's, as a project of a vendor's has them.
//
//go:embed package.json package-lock.json kvhost.mk assembly
var Files embed.FS
