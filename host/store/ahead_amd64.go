package store

import "unsafe"

// fetch calls for the cache lines that the pointers lead to, and those span bytes further on, and waits for none. nil is fine.
//
//go:noescape
func fetch(list *[step]unsafe.Pointer, span uintptr)

// havingAll is havingOne for each bucket that is not nil.
//
//go:noescape
func havingAll(buckets *[step]*bucket, prints *[step]uint64, shift uint, sets *[step]uint32)
