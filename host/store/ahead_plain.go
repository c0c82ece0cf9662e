//go:build !amd64

package store

// havingAll is havingOne for each bucket that is not nil.
func havingAll(buckets *[step]*bucket, prints *[step]uint64, shift uint, sets *[step]uint32) {
	for i, b := range buckets {
		if sets[i] = 0; b != nil {
			sets[i] = havingOne(b, prints[i], shift)
		}
	}
}
