package index

import (
	"testing"

	"github.com/kvhost/kvhost/host/kv"
)

// largest has as many slots as there may be: the tags in its tables have four bits.
func largest(entries uint64) *Index {
	x := plainIndex(1<<27, func(k kv.Key) uint64 { return kv.Fingerprint(kv.Digest{}, 0, k) })
	var parent uint64
	for n := range entries {
		k := hashKey(n, 32)
		fp := x.fingerprint(0, k)
		x.SetPieces(x.Add(fp, Owner{}, &k, parent, uint32(n)), 1)
		parent = fp
	}
	return x
}

// With short tags half of all keys match an entry that is not theirs, in one bucket or the other. A lookup that came to
// the right one only afterwards would wait for memory that nobody has prefetched.
func TestPrefetchTellsShortTagsApart(t *testing.T) {
	const entries = 200_000
	x := largest(entries)
	printer := kv.PrinterOf(kv.Digest{}, 0)
	var keys []kv.Key
	for n := uint64(0); n < entries; n += 97 {
		keys = append(keys, hashKey(n, 32))
	}
	var ahead Prefetch
	wrong := 0
	for i, k := range keys {
		if i%PrefetchStep == 0 {
			ahead.Run(x, 0, &printer, keys, i)
		}
		if got := ahead.Likely(0, i); got != x.Find(ahead.Fingerprint(i), 0, &k) {
			wrong++
		}
	}
	// Left are those in a second bucket, behind an entry that matches there.
	if wrong > len(keys)/10 {
		t.Errorf("%d of %d keys have another entry prefetched", wrong, len(keys))
	}
}

// A new child is not compared with entries that are no siblings, but for a family that may be large: each would be read
// from memory that no cache holds.
func TestNewChildReadsNoStrangers(t *testing.T) {
	x := largest(1000)
	read, of := 0, x.families.of
	x.families.of = func(slot uint32) uint64 {
		read++
		return of(slot)
	}
	const more = 50_000
	var parent uint64
	for n := range uint64(more) {
		k := hashKey(1000+n, 32)
		fp := x.fingerprint(0, k)
		x.Add(fp, Owner{}, &k, parent, 0)
		parent = fp
	}
	if read > more*5/4 { // its own, once
		t.Errorf("%d entries read for %d children", read, more)
	}
}
