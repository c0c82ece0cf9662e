package store

import (
	"math/rand/v2"
	"testing"

	"github.com/kvhost/kvhost/host/chunk"
)

// plainIndex is an index over one class, whose fingerprints can be made to collide.
func plainIndex(max uint32, print func(k chunk.Key) uint64) *index {
	return newIndex(max, func(_ uint16, k chunk.Key) uint64 { return print(k) }, func(class uint16) uint16 { return class })
}

// TestIndexAgainstMap adds and removes at random, beside a map, with honest fingerprints and with ones that collide.
func TestIndexAgainstMap(t *testing.T) {
	honest := func(k chunk.Key) uint64 { return chunk.Fingerprint(chunk.Digest{}, 0, k) }
	for name, print := range map[string]func(k chunk.Key) uint64{
		"honest":      honest,
		"one shard":   func(k chunk.Key) uint64 { return honest(k)>>shardBits | 1 },
		"few homes":   func(k chunk.Key) uint64 { return honest(k)&0xc00000000000ff00 | 1 },
		"few at all":  func(k chunk.Key) uint64 { return honest(k)%37 + 1 },
		"low key bit": func(k chunk.Key) uint64 { return uint64(k[0]) + 1 },
	} {
		t.Run(name, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(3, 4))
			x := plainIndex(300, print)
			model := map[uint64]uint32{}
			for step := range 20_000 {
				n := rng.Uint64N(400)
				k := testKey(n)
				if n%2 == 0 {
					clear(k[keyHead:]) // short keys beside long ones
				}
				slot := x.find(print(k), 5, &k)
				want, there := model[n]
				switch {
				case there && slot != want || !there && slot != none:
					t.Fatalf("step %d: key %d found in slot %d, want %d, %t", step, n, slot, want, there)
				case there && rng.IntN(2) == 0:
					x.detach(slot)
					x.release(slot)
					delete(model, n)
				case !there:
					parent := rng.Uint64N(5)
					added := x.add(print(k), owner{class: 5}, &k, parent, uint32(n))
					crowded := name == "few at all" || name == "low key bit"
					if (added == none) != (len(model) == 300) && !crowded {
						t.Fatalf("step %d: slot %d with %d of 300 in use", step, added, len(model))
					}
					if added != none {
						model[n] = added
						x.touch(added)
						x.setPieces(added, 1<<(n%64))
					}
				}
			}
			checkFamilies(t, x, model)
		})
	}
}

func checkFamilies(t *testing.T, x *index, model map[uint64]uint32) {
	t.Helper()
	if int(x.used) != len(model) || x.high > 300 {
		t.Errorf("%d entries in %d slots, want %d", x.used, x.high, len(model))
	}
	families, want := map[uint32]uint64{}, map[uint32]uint64{}
	for parent := uint64(1); parent < 5; parent++ {
		x.children(parent, func(slot uint32) { families[slot] = parent })
	}
	for n, slot := range model {
		e := x.at(slot)
		if p := e.parentPrint(); p != 0 {
			want[slot] = p
		}
		if x.pieces(slot) != 1<<(n%64) {
			t.Errorf("key %d has pieces %#x", n, x.pieces(slot))
		}
		if k := x.key(slot); k[0] != testKey(n)[0] || e.depth() != uint32(n) {
			t.Errorf("key %d became %s at depth %d", n, k, e.depth())
		}
	}
	if len(families) != len(want) {
		t.Errorf("%d entries in families, want %d", len(families), len(want))
	}
	for slot, p := range want {
		if families[slot] != p {
			t.Errorf("slot %d in family %d, want %d", slot, families[slot], p)
		}
	}
}

func TestTicksKeepTheirOrder(t *testing.T) {
	x := plainIndex(8, func(k chunk.Key) uint64 { return chunk.Fingerprint(chunk.Digest{}, 0, k) })
	for n := range uint64(4) {
		k := testKey(n)
		x.touch(x.add(x.hash(0, k), owner{}, &k, 0, 0))
	}
	x.clock = 1<<32 - 2
	x.touch(3)
	x.touch(2) // halves
	x.touch(0)
	for _, pair := range [][2]uint32{{1, 3}, {3, 2}, {2, 0}} {
		if a, b := x.at(pair[0]).touched(), x.at(pair[1]).touched(); a >= b {
			t.Errorf("slot %d at %d, slot %d at %d", pair[0], a, pair[1], b)
		}
	}
}

// TestBytesPerEntry holds the index to its promise: 64 bytes with the longest keys, 48 with keys of 16 bytes.
func TestBytesPerEntry(t *testing.T) {
	for _, keyBytes := range []int{16, 32} {
		x := plainIndex(1<<20, func(k chunk.Key) uint64 { return chunk.Fingerprint(chunk.Digest{}, 0, k) })
		var parent uint64
		const entries = 300_000
		for n := range uint64(entries) {
			k := hashKey(n, keyBytes)
			print := x.hash(0, k)
			x.setPieces(x.add(print, owner{}, &k, parent, 0), 1)
			parent = print
		}
		const fixed = 512 << 10 // the heads of the shards, and room in the slab for less than 4,096 entries
		if got := float64(x.memory()-fixed) / entries; got > float64(32+keyBytes) {
			t.Errorf("%.1f bytes per entry with keys of %d", got, keyBytes)
		}
	}
}

func FuzzTempOwner(f *testing.F) {
	f.Add(".a.kv.host1.1f.tmp")
	f.Add("..tmp")
	f.Fuzz(func(t *testing.T, base string) {
		if owner, ok := tempOwner(base); ok && !validHostID(owner) {
			t.Fatalf("%q is of %q", base, owner)
		}
	})
}

func TestTempNames(t *testing.T) {
	long := make([]byte, maxName)
	for i := range long {
		long[i] = 'a'
	}
	for _, base := range []string{"x", "a.b.c", string(long)} {
		name := tempName("/root/dir/"+base, "host1", 1<<63)
		temp := name[len("/root/dir/"):]
		if owner, ok := tempOwner(temp); !ok || owner != "host1" || len(temp) > maxName {
			t.Errorf("%q: %q, %t", temp, owner, ok)
		}
	}
	for _, base := range []string{"x.tmp", ".x.tmp", ".x.host1.tmp", ".x.HOST.1f.tmp", ".x.host1.zz.tmp", ".x.host1.1f", ".host1.1f.tmp"} {
		if owner, ok := tempOwner(base); ok {
			t.Errorf("%q is taken for a temporary of %q", base, owner)
		}
	}
}
