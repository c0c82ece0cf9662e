package slots

// Buckets holds the heads of a hash table's chains. Each [Buckets.Add] adds one bucket, so a table grows with its content in
// small steps (W. Litwin, Linear Hashing, VLDB 1980). The caller links the chains.
type Buckets struct {
	heads Array[uint32]
	n     uint32 // number of buckets
	whole uint32 // greatest power of two up to n
}

// NewBuckets returns a table with one bucket and room for at most n. blank is the head of an empty chain.
func NewBuckets(n, blank uint32) Buckets {
	b := Buckets{heads: NewArray(max(n, 1), blank), n: 1, whole: 1}
	b.heads.Make(0)
	return b
}

// Of returns the head of the chain for a hash.
func (b *Buckets) Of(hash uint32) *uint32 {
	at := hash & (2*b.whole - 1)
	if at >= b.n {
		at -= b.whole
	}
	return b.heads.At(at)
}

// Add adds a bucket by splitting another one. The caller must move the entries with bit set in their hash from the chain old to
// the chain made. ok is false if there are n buckets already.
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
