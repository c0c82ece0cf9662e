package index

import (
	"math/bits"
	"unsafe"

	"github.com/kvhost/kvhost/host/kv"
)

// Prefetch loads the memory that a lookup of many keys will read into the processor's cache, some steps ahead, because such a
// lookup spends nearly all of its time waiting for memory. For each key it loads the first bucket, then the matching entries of
// that bucket, then the second bucket if none of them has the key, and then the matching entries of the second bucket.
type Prefetch struct {
	id int // identifies the index to which all fields belong
	// Each stage has passed the keys before a number: their fingerprints are known, their first buckets have been searched, the
	// matches there have been compared, and their second buckets have been searched.
	hashed, searched, compared, ended int
	fps                               [ring]uint64
	buckets                           [ring]*bucket // buckets to be searched
	matches                           [ring]uint32  // cells of the first bucket that must be compared, because there are several or the tag is short
	likely                            [ring]uint32  // slots that were found, or None; compared by key only if they had to be
}

// surelyOne is the maximum number of bits of a slot at which tags are long enough that hardly any wrong entry matches.
const surelyOne = 22

// PrefetchStep is the number of keys that one call of [Prefetch.Run] advances.
const PrefetchStep = 8

const ring = 8 * PrefetchStep

// Run must be called before every PrefetchStep-th key. i is the index of the next key, and id identifies the index x.
func (p *Prefetch) Run(x *Index, id int, printer *kv.Printer, keys []kv.Key, i int) {
	if p.id != id || i == 0 {
		p.id, p.hashed, p.searched, p.compared, p.ended = id, i, i, i, i
	}
	for most := min(i+5*PrefetchStep, len(keys)); p.hashed < most; {
		from := p.hashed % ring
		for end := min(p.hashed+PrefetchStep, most); p.hashed < end; p.hashed++ {
			n := p.hashed % ring
			p.fps[n] = printer.Print(&keys[p.hashed])
			p.buckets[n] = x.byKey.first(p.fps[n])
			p.likely[n], p.matches[n] = None, 0
		}
		prefetchLines((*[PrefetchStep]unsafe.Pointer)(unsafe.Pointer(&p.buckets[from])), 0)
	}
	for ; p.searched < min(i+4*PrefetchStep, len(keys)); p.searched = min(p.searched+PrefetchStep, len(keys)) {
		p.search(x, p.searched%ring, min(PrefetchStep, len(keys)-p.searched), true)
	}
	for ; p.compared < min(i+3*PrefetchStep, len(keys)); p.compared = min(p.compared+PrefetchStep, len(keys)) {
		p.compare(x, keys[p.compared:min(p.compared+PrefetchStep, len(keys))], p.compared%ring)
	}
	for ; p.ended < min(i+2*PrefetchStep, len(keys)); p.ended = min(p.ended+PrefetchStep, len(keys)) {
		p.search(x, p.ended%ring, min(PrefetchStep, len(keys)-p.ended), false)
	}
}

// Fingerprint returns the fingerprint of the i-th key.
func (p *Prefetch) Fingerprint(i int) uint64 { return p.fps[i%ring] }

// Likely returns the slot that the i-th key probably has in this index, or None.
func (p *Prefetch) Likely(id, i int) uint32 {
	if p.id != id {
		return None
	}
	return p.likely[i%ring]
}

// search searches the first or the second buckets of n keys.
func (p *Prefetch) search(x *Index, from, n int, first bool) {
	var next, other [PrefetchStep]unsafe.Pointer
	var sets [PrefetchStep]uint32
	buckets, fps := (*[PrefetchStep]*bucket)(p.buckets[from:]), (*[PrefetchStep]uint64)(p.fps[from:])
	matchBuckets(buckets, fps, x.byKey.shift, &sets)
	others := false
	for i, set := range sets[:n] {
		b := buckets[i]
		if set == 0 {
			if buckets[i] = nil; first && b != nil {
				buckets[i] = x.byKey.second(fps[i])
				next[i] = unsafe.Pointer(buckets[i])
			}
			continue
		}
		p.likely[from+i], next[i] = x.entryIn(b[bits.TrailingZeros32(set)])
		rest := set & (set - 1)
		if rest != 0 {
			_, other[i] = x.entryIn(b[bits.TrailingZeros32(rest)])
			others = true
		}
		if first && (rest != 0 || x.byKey.shift > surelyOne) {
			p.matches[from+i] = set
		} else {
			buckets[i] = nil
		}
	}
	prefetchLines(&next, unsafe.Sizeof(longEntry{})-1)
	if others {
		prefetchLines(&other, unsafe.Sizeof(longEntry{})-1)
	}
}

// entryIn returns the slot in a cell and its entry, or None and nil if the cell is empty.
func (x *Index) entryIn(cell uint32) (uint32, unsafe.Pointer) {
	slot := x.byKey.slotOf(cell)
	if slot >= x.high {
		return None, nil
	}
	return slot, unsafe.Pointer(x.At(slot))
}

// compare compares keys with the matches of their first bucket, if there was doubt. If no match has the key, the second bucket
// comes next.
func (p *Prefetch) compare(x *Index, keys []kv.Key, from int) {
	var next [PrefetchStep]unsafe.Pointer
	doubt := false
	for i := range keys {
		n := from + i
		set := p.matches[n]
		if set == 0 {
			continue
		}
		b := p.buckets[n]
		p.likely[n], p.buckets[n] = None, nil
		for ; set != 0 && p.likely[n] == None; set &= set - 1 {
			if slot := x.byKey.slotOf(b[bits.TrailingZeros32(set)]); x.Match(slot, &keys[i]) != nil {
				p.likely[n] = slot
			}
		}
		if p.likely[n] == None {
			p.buckets[n] = x.byKey.second(p.fps[n])
			next[i] = unsafe.Pointer(p.buckets[n])
			doubt = true
		}
	}
	if doubt {
		prefetchLines(&next, 0)
	}
}

// matchBucket returns the cells of a bucket with the tag of a fingerprint, as bits. The set may include an empty cell, which
// has a slot higher than any other.
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
