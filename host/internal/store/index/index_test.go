package index

import (
	"encoding/binary"
	"math/rand/v2"
	"testing"

	"github.com/kvhost/kvhost/host/kv"
	"github.com/zeebo/xxh3"
)

// testKey is the n-th key: spread like a hash, the same in every run.
func testKey(n uint64) (k kv.Key) {
	r := rand.New(rand.NewPCG(n, 7))
	for i := 0; i < len(k); i += 8 {
		binary.LittleEndian.PutUint64(k[i:], r.Uint64())
	}
	return k
}

// hashKey is a key that is cheap to make, of 16 or 32 bytes.
func hashKey(n uint64, bytes int) (k kv.Key) {
	for i := 0; i < bytes; i += 8 {
		binary.LittleEndian.PutUint64(k[i:],
			xxh3.HashSeed(binary.LittleEndian.AppendUint64(make([]byte, 0, 8), n), uint64(i)))
	}
	return k
}

// plainIndex is an index over one class, whose fingerprints can be made to collide.
func plainIndex(max uint32, fp func(k kv.Key) uint64) *Index {
	return New(max, func(_ uint16, k kv.Key) uint64 { return fp(k) }, func(class uint16) uint16 { return class })
}

// TestIndexAgainstMap adds and removes at random, beside a map, with honest fingerprints and with ones that collide.
func TestIndexAgainstMap(t *testing.T) {
	honest := func(k kv.Key) uint64 { return kv.Fingerprint(kv.Digest{}, 0, k) }
	for name, fp := range map[string]func(k kv.Key) uint64{
		"honest":      honest,
		"one shard":   func(k kv.Key) uint64 { return honest(k)>>shardBits | 1 },
		"few homes":   func(k kv.Key) uint64 { return honest(k)&0xc00000000000ff00 | 1 },
		"few at all":  func(k kv.Key) uint64 { return honest(k)%37 + 1 },
		"low key bit": func(k kv.Key) uint64 { return uint64(k[0]) + 1 },
	} {
		t.Run(name, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(3, 4))
			x := plainIndex(300, fp)
			model := map[uint64]uint32{}
			for step := range 20_000 {
				n := rng.Uint64N(400)
				k := testKey(n)
				if n%2 == 0 {
					clear(k[keyHead:]) // short keys beside long ones
				}
				slot := x.Find(fp(k), 5, &k)
				want, there := model[n]
				switch {
				case there && slot != want || !there && slot != None:
					t.Fatalf("step %d: key %d found in slot %d, want %d, %t", step, n, slot, want, there)
				case there && rng.IntN(2) == 0:
					x.Detach(slot)
					x.Release(slot)
					delete(model, n)
				case !there:
					parent := rng.Uint64N(5)
					added := x.Add(fp(k), Owner{Class: 5}, &k, parent, uint32(n))
					crowded := name == "few at all" || name == "low key bit"
					if (added == None) != (len(model) == 300) && !crowded {
						t.Fatalf("step %d: slot %d with %d of 300 in use", step, added, len(model))
					}
					if added != None {
						model[n] = added
						x.Touch(added)
						x.SetPieces(added, 1<<(n%64))
					}
				}
			}
			checkFamilies(t, x, model)
			if err := x.Check(); err != nil {
				t.Error(err)
			}
		})
	}
}

func checkFamilies(t *testing.T, x *Index, model map[uint64]uint32) {
	t.Helper()
	if int(x.Len()) != len(model) || x.High() > 300 {
		t.Errorf("%d entries in %d slots, want %d", x.Len(), x.High(), len(model))
	}
	families, want := map[uint32]uint64{}, map[uint32]uint64{}
	for parent := uint64(1); parent < 5; parent++ {
		x.Children(parent, func(slot uint32) { families[slot] = parent })
	}
	for n, slot := range model {
		e := x.At(slot)
		if p := e.Parent(); p != 0 {
			want[slot] = p
		}
		if x.Pieces(slot) != 1<<(n%64) {
			t.Errorf("key %d has pieces %#x", n, x.Pieces(slot))
		}
		if k := x.Key(slot); k[0] != testKey(n)[0] || e.Depth() != uint32(n) {
			t.Errorf("key %d became %s at depth %d", n, k, e.Depth())
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
	x := plainIndex(8, func(k kv.Key) uint64 { return kv.Fingerprint(kv.Digest{}, 0, k) })
	for n := range uint64(4) {
		k := testKey(n)
		x.Touch(x.Add(x.fingerprint(0, k), Owner{}, &k, 0, 0))
	}
	x.clock = 1<<32 - 2
	x.Touch(3)
	x.Touch(2) // halves
	x.Touch(0)
	for _, pair := range [][2]uint32{{1, 3}, {3, 2}, {2, 0}} {
		if a, b := x.At(pair[0]).LastTouch(), x.At(pair[1]).LastTouch(); a >= b {
			t.Errorf("slot %d at %d, slot %d at %d", pair[0], a, pair[1], b)
		}
	}
}

// TestBytesPerEntry holds the index to its promise: 64 bytes with the longest keys, 48 with keys of 16 bytes.
func TestBytesPerEntry(t *testing.T) {
	for _, keyBytes := range []int{16, 32} {
		x := plainIndex(1<<20, func(k kv.Key) uint64 { return kv.Fingerprint(kv.Digest{}, 0, k) })
		var parent uint64
		const entries = 300_000
		for n := range uint64(entries) {
			k := hashKey(n, keyBytes)
			fp := x.fingerprint(0, k)
			x.SetPieces(x.Add(fp, Owner{}, &k, parent, 0), 1)
			parent = fp
		}
		const fixed = 512 << 10 // the heads of the shards, and room in the slab for less than 4,096 entries
		if got := float64(x.Memory()-fixed) / entries; got > float64(32+keyBytes) {
			t.Errorf("%.1f bytes per entry with keys of %d", got, keyBytes)
		}
	}
}
