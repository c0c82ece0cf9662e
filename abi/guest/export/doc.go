// Package export turns Go guests into kvhost modules. It exists for GOOS=wasip1 only.
//
// The roles of a module are its exports, so each role has its own package below this one, and a module exports only the
// functions of the packages that it imports. Its main package is five lines:
//
//	package main
//
//	import (
//		"example.com/mypolicy"
//		"github.com/kvhost/kvhost/abi/guest/export/evict"
//	)
//
//	func init() { evict.Export(mypolicy.New) }
//
//	func main() {}
//
// Build it with GOOS=wasip1 GOARCH=wasm go build -buildmode=c-shared. Registration happens in init because main does not
// run in such a module. A module may take several roles, each with its own value.
//
// The host reads and writes buffers in this package: 16-aligned, allocated when the host asks for them, never moved
// afterwards. A batch is read in place, because a record's memory layout is its wire layout.
package export
