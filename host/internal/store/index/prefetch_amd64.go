//go:build !purego

package index

import "unsafe"

// prefetchLines starts loading the cache lines that the pointers lead to, and those span bytes after them. A pointer
// may be nil.
//
//go:noescape
func prefetchLines(list *[PrefetchStep]unsafe.Pointer, span uintptr)

// matchBuckets calls [matchBucket] for each bucket that is not nil. The set of a nil bucket is empty.
//
//go:noescape
func matchBuckets(buckets *[PrefetchStep]*bucket, fps *[PrefetchStep]uint64, shift uint, sets *[PrefetchStep]uint32)
