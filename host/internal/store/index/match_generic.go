//go:build !amd64 || purego

package index

// matchBuckets calls [matchBucket] for each bucket that is not nil. The set of a nil bucket is empty.
func matchBuckets(buckets *[PrefetchStep]*bucket, fps *[PrefetchStep]uint64, shift uint, sets *[PrefetchStep]uint32) {
	for i, b := range buckets {
		if sets[i] = 0; b != nil {
			sets[i] = matchBucket(b, fps[i], shift)
		}
	}
}
