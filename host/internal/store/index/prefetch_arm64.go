//go:build !purego

package index

import "unsafe"

// prefetchLines starts loading the cache lines that the pointers lead to, and those span bytes after them. A pointer
// may be nil.
//
//go:noescape
func prefetchLines(list *[PrefetchStep]unsafe.Pointer, span uintptr)
