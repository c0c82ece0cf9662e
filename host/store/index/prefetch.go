package index

import (
	"math/bits"
	"unsafe"

	"github.com/kvhost/kvhost/host/chunk"
)

// Prefetch loads what a lookup of many keys will read into the processor's cache, some steps before it is read: a
// lookup does little but wait for memory. First comes the first bucket of a key, then the second bucket if the first
// has no match, then the entry.
type Prefetch struct {
	id       int    // of the index that all of this is of
	hashed   int    // keys before this one have their fingerprints
	searched [2]int // keys before these have had their first, and second, bucket searched
	fps      [ring]uint64
	buckets  [ring]*bucket // to be searched
	likely   [ring]uint32  // the slots found, not yet compared by key; None
}

// PrefetchStep is how many keys one call of [Prefetch.Run] goes forward.
const PrefetchStep = 8

const ring = 8 * PrefetchStep

// Run must be called before every PrefetchStep-th key. i is the key that comes next, id says which index x is.
func (p *Prefetch) Run(x *Index, id int, printer *chunk.Printer, keys []chunk.Key, i int) {
	if p.id != id || i == 0 {
		p.id, p.hashed, p.searched = id, i, [2]int{i, i}
	}
	for most := min(i+4*PrefetchStep, len(keys)); p.hashed < most; {
		from := p.hashed % ring
		for end := min(p.hashed+PrefetchStep, most); p.hashed < end; p.hashed++ {
			n := p.hashed % ring
			p.fps[n] = printer.Print(&keys[p.hashed])
			p.buckets[n] = x.byKey.first(p.fps[n])
			p.likely[n] = None
		}
		prefetchLines((*[PrefetchStep]unsafe.Pointer)(unsafe.Pointer(&p.buckets[from])), 0)
	}
	for second := range p.searched {
		at := &p.searched[second]
		for most := min(i+(3-second)*PrefetchStep, len(keys)); *at < most; *at = min(*at+PrefetchStep, most) {
			p.search(x, *at%ring, min(PrefetchStep, most-*at), second == 0)
		}
	}
}

// Fingerprint is the fingerprint of the i-th key.
func (p *Prefetch) Fingerprint(i int) uint64 { return p.fps[i%ring] }

// Likely is the slot that the i-th key is likely to have in this index, or None.
func (p *Prefetch) Likely(id, i int) uint32 {
	if p.id != id {
		return None
	}
	return p.likely[i%ring]
}

// search searches the buckets of n keys.
func (p *Prefetch) search(x *Index, from, n int, first bool) {
	var next [PrefetchStep]unsafe.Pointer
	var sets [PrefetchStep]uint32
	buckets, fps := (*[PrefetchStep]*bucket)(p.buckets[from:]), (*[PrefetchStep]uint64)(p.fps[from:])
	matchBuckets(buckets, fps, x.byKey.shift, &sets)
	for i := range n {
		b := buckets[i]
		buckets[i] = nil
		if set := sets[i]; set != 0 {
			if slot := x.byKey.slotOf(b[bits.TrailingZeros32(set)]); slot < x.high {
				p.likely[from+i] = slot
				next[i] = unsafe.Pointer(x.At(slot))
			}
		} else if first && b != nil {
			buckets[i] = x.byKey.second(fps[i])
			next[i] = unsafe.Pointer(buckets[i])
		}
	}
	prefetchLines(&next, unsafe.Sizeof(longEntry{})-1)
}

// matchBucket is the set of a bucket's cells with the fingerprint's tag, one bit each. An empty cell may be among them:
// its slot is above all others.
func matchBucket(b *bucket, fp uint64, shift uint) (set uint32) {
	want := uint32(fp) << (shift & 31)
	for i := bucketCells - 1; i >= 0; i-- {
		var is uint32
		if (b[i]^want)>>(shift&31) == 0 {
			is = 1
		}
		set = set<<1 | is
	}
	return set
}
