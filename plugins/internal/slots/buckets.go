package slots

// Buckets are the heads of a hash table's chains. There is one more with each [Buckets.Add], so that a table grows with what
// is in it, by a step at a time (W. Litwin, Linear Hashing, VLDB 1980). The chains are the caller's.
type Buckets struct {
	heads Array[uint32]
	n     uint32 // buckets
	whole uint32 // the greatest power of two up to n
}

// NewBuckets makes one bucket, of at most n, with the head blank.
func NewBuckets(n, blank uint32) Buckets {
	b := Buckets{heads: NewArray(max(n, 1), blank), n: 1, whole: 1}
	b.heads.Make(0)
	return b
}

// Of is the head of the chain for a hash.
func (b *Buckets) Of(hash uint32) *uint32 {
	at := hash & (2*b.whole - 1)
	if at >= b.n {
		at -= b.whole
	}
	return b.heads.At(at)
}

// Add makes one more bucket by splitting another one: the caller moves the entries with the bit in their hash from the chain
// of old to the chain of made. ok is false when there are as many buckets as there may be.
func (b *Buckets) Add() (old, made *uint32, bit uint32, ok bool) {
	if b.n == b.heads.Len() {
		return nil, nil, 0, false
	}
	at := b.n
	old, made, bit = b.heads.At(at-b.whole), b.heads.Make(at), b.whole
	if b.n++; b.n == 2*b.whole {
		b.whole = b.n
	}
	return old, made, bit, true
}
