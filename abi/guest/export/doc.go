// Package export turns Go guests into kvhost modules. It exists for GOOS=wasip1 only.
//
// The one idea: a module's roles are its exports, so each role has a package of its own below this one, and its
// functions are exported only when that package is imported. A module's main package is five lines:
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
// built with GOOS=wasip1 GOARCH=wasm go build -buildmode=c-shared. Registration happens in init because main does not
// run in a module of this kind. A module may take several roles; each gets a value of its own.
//
// The host reads and writes buffers that live here: 16-aligned, allocated when the host asks for them, never moved
// after. A batch is read in place, because a record's memory layout is its wire layout.
package export
