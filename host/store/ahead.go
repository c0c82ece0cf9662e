package store

import (
	"math/bits"
	"unsafe"

	"github.com/kvhost/kvhost/host/chunk"
)

// ahead is what a walk has read before its turn comes. A lookup of many keys does little but wait for memory, and so it
// calls for what it needs some steps before: the first bucket of a key; the second if the first has nothing; the entry.
type ahead struct {
	root     int // the one that all of this is of
	hashed   int // keys that were begun with, up to
	searched [2]int
	prints   [ring]uint64
	buckets  [ring]*bucket // to be searched
	likely   [ring]uint32  // slots, as far as that tells; none
}

const (
	step = 8 // keys
	ring = 8 * step
)

// read is due before each step. The root is locked.
func (a *ahead) read(x *index, root int, printer *chunk.Printer, keys []chunk.Key, i int) {
	if a.root != root || i == 0 {
		a.root, a.hashed, a.searched = root, i, [2]int{i, i}
	}
	for most := min(i+4*step, len(keys)); a.hashed < most; {
		from := a.hashed % ring
		for end := min(a.hashed+step, most); a.hashed < end; a.hashed++ {
			n := a.hashed % ring
			a.prints[n] = printer.Print(&keys[a.hashed])
			a.buckets[n] = x.first(a.prints[n])
			a.likely[n] = none
		}
		fetch((*[step]unsafe.Pointer)(unsafe.Pointer(&a.buckets[from])), 0)
	}
	for second := range a.searched {
		at := &a.searched[second]
		for most := min(i+(3-second)*step, len(keys)); *at < most; *at = min(*at+step, most) {
			a.search(x, *at%ring, min(step, most-*at), second == 0)
		}
	}
}

// search looks into the buckets of n keys.
func (a *ahead) search(x *index, from, n int, first bool) {
	var next [step]unsafe.Pointer
	var sets [step]uint32
	buckets, prints := (*[step]*bucket)(a.buckets[from:]), (*[step]uint64)(a.prints[from:])
	havingAll(buckets, prints, x.shift, &sets)
	for i := range n {
		b := buckets[i]
		buckets[i] = nil
		if set := sets[i]; set != 0 {
			if slot := x.slotOf(b[bits.TrailingZeros32(set)]); slot < x.high {
				a.likely[from+i] = slot
				next[i] = unsafe.Pointer(x.at(slot))
			}
		} else if first && b != nil {
			buckets[i] = x.second(prints[i])
			next[i] = unsafe.Pointer(buckets[i])
		}
	}
	fetch(&next, unsafe.Sizeof(longEntry{})-1)
}

// havingOne is the set of a bucket's cells with the fingerprint's tag, a bit each. An empty cell may be among them: its slot
// is beyond all others.
func havingOne(b *bucket, print uint64, shift uint) (set uint32) {
	want := uint32(print) << (shift & 31)
	for i := bucketCells - 1; i >= 0; i-- {
		var is uint32
		if (b[i]^want)>>(shift&31) == 0 {
			is = 1
		}
		set = set<<1 | is
	}
	return set
}
