package index

import (
	"math/bits"
	"unsafe"

	"github.com/kvhost/kvhost/host/kv"
)

// Prefetch loads what a lookup of many keys will read into the processor's cache, some steps before it is read: a
// lookup does little but wait for memory. First comes the first bucket of a key, then the entries that match there, then
// the second bucket if none of them has the key, then the entries that match there.
type Prefetch struct {
	id       int // of the index that all of this is of
	hashed   int // keys before this one have their fingerprints
	searched int // keys before this one have had their first bucket searched
	compared int // keys before this one have been compared with what matches there
	ended    int // keys before this one have had their second bucket searched
	fps      [ring]uint64
	buckets  [ring]*bucket // to be searched
	matches  [ring]uint32  // cells of the first bucket that must be compared: of more than one, or by a short tag
	likely   [ring]uint32  // the slots found, not yet compared by key unless they had to be; None
}

// surelyOne is how many bits of a slot leave tags so long that hardly any entry but the right one matches.
const surelyOne = 22

// PrefetchStep is how many keys one call of [Prefetch.Run] goes forward.
const PrefetchStep = 8

const ring = 8 * PrefetchStep

// Run must be called before every PrefetchStep-th key. i is the key that comes next, id says which index x is.
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

// Fingerprint is the fingerprint of the i-th key.
func (p *Prefetch) Fingerprint(i int) uint64 { return p.fps[i%ring] }

// Likely is the slot that the i-th key is likely to have in this index, or None.
func (p *Prefetch) Likely(id, i int) uint32 {
	if p.id != id {
		return None
	}
	return p.likely[i%ring]
}

// search searches the buckets of n keys, the first ones or the second.
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

// entryIn is the slot in a cell, and its entry, or none.
func (x *Index) entryIn(cell uint32) (uint32, unsafe.Pointer) {
	slot := x.byKey.slotOf(cell)
	if slot >= x.high {
		return None, nil
	}
	return slot, unsafe.Pointer(x.At(slot))
}

// compare finds which match of a first bucket is the key's, if that was in doubt. If none is, the second bucket is next.
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
