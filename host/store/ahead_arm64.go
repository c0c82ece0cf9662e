package store

import "unsafe"

// fetch calls for the cache lines that the pointers lead to, and those span bytes further on, and waits for none. nil is fine.
//
//go:noescape
func fetch(list *[step]unsafe.Pointer, span uintptr)
