package index

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
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
			testenv.NoError(t, x.Check())
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

// An index that is raised finds what it had, and takes more.
func TestRaise(t *testing.T) {
	key := func(n uint32) *kv.Key { return &kv.Key{byte(n), byte(n >> 8), byte(n >> 16), 1} }
	print := func(n uint32) uint64 { return uint64(n+1) * 0x9e3779b97f4a7c15 }
	x := New(4, func(_ uint16, k kv.Key) uint64 {
		return print(uint32(k[0]) | uint32(k[1])<<8 | uint32(k[2])<<16)
	}, func(class uint16) uint16 { return class })
	add := func(n uint32) bool { return x.Add(print(n), Owner{}, key(n), 0, 0) != None }
	for n := range uint32(4) {
		if !add(n) {
			t.Fatal(n)
		}
	}
	if add(4) {
		t.Fatal("a fifth entry of four")
	}
	reach := x.Reach()
	x.Raise(5000)
	x.Raise(100) // it never gets smaller
	if x.Max() != 5000 || x.Reach() != reach {
		t.Fatalf("%d entries at most, and %d after more raising, %d before", x.Max(), x.Reach(), reach)
	}
	for n := uint32(4); n < 5000; n++ {
		if !add(n) {
			t.Fatal(n)
		}
	}
	for n := range uint32(5000) {
		if x.Find(print(n), 0, key(n)) == None {
			t.Fatalf("%d is lost", n)
		}
	}
	if x.Raise(1 << 31); x.Max() != reach {
		t.Errorf("raised to %d, beyond %d", x.Max(), reach)
	}
}

// TestMatchBuckets compares the assembly with the Go code that it stands for.
func TestMatchBuckets(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	for shift := uint(1); shift < 32; shift++ {
		for range 200 {
			var buckets [PrefetchStep]*bucket
			var fps [PrefetchStep]uint64
			var got [PrefetchStep]uint32
			for i := range buckets {
				fps[i] = rng.Uint64()
				if rng.IntN(5) == 0 {
					continue
				}
				buckets[i] = new(bucket)
				for j := range buckets[i] {
					switch c := &buckets[i][j]; rng.IntN(4) {
					case 0:
						*c = uint32(fps[i])<<shift | rng.Uint32()&(1<<shift-1)
					case 1:
						*c = uint32(fps[i])<<shift ^ 1<<(shift+uint(rng.IntN(int(32-shift))))
					case 2:
						*c = emptyCell
					default:
						*c = rng.Uint32()
					}
				}
			}
			matchBuckets(&buckets, &fps, shift, &got)
			for i, b := range buckets {
				want := uint32(0)
				if b != nil {
					want = matchBucket(b, fps[i], shift)
				}
				if got[i] != want {
					t.Fatalf("shift %d: bucket %d of %x for %x: %016b, want %016b", shift, i, b, fps[i], got[i], want)
				}
			}
		}
	}
}

func keyOf(r *rand.Rand, bytes int) (k kv.Key) {
	for i := range bytes {
		k[i] = byte(r.Uint32())
	}
	return k
}

// paths are names as policies give them, and some that have nothing to do with the key.
func paths(r *rand.Rand, k kv.Key, rank uint32) []string {
	x := hex.EncodeToString(k[:])
	return []string{
		fmt.Sprintf("a1b2c3_r%d/%s/%s_g0/%s.bin", rank, x[:3], x[3:5], x),
		fmt.Sprintf("m/%s/%s/%s_g1_r%d.kv", x[:1], x[1:2], x[:32], rank),
		fmt.Sprintf("%d/%x", r.Uint32(), r.Uint64()),
		fmt.Sprintf("dead/beef/%s-%s", x[60:], x[:7]),
		strings.Repeat("f", 255),
		x + x[:1],
		"one",
	}
}

// TestTable compares a table with a map under random additions and removals.
func TestTable(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	var table nameTable
	keys, want := map[uint32]kv.Key{}, map[uint32][]pieceformat.Name{}
	for range 20_000 {
		slot := r.Uint32N(3000) * 5
		if _, ok := want[slot]; ok && r.Uint32N(3) == 0 {
			table.Remove(slot)
			delete(want, slot)
			continue
		}
		if _, ok := want[slot]; !ok {
			keys[slot] = keyOf(r, []int{16, 32}[r.Uint32N(2)])
		}
		k, rank := keys[slot], r.Uint32N(64)
		list := paths(r, k, rank)
		n := pieceformat.Name{Rank: rank, Path: list[r.IntN(len(list))]}
		table.Add(slot, &k, n)
		want[slot] = append(want[slot], n)
	}
	for slot := range uint32(15_000) {
		k := keys[slot]
		if got := table.List(slot, &k); !slices.Equal(got, want[slot]) {
			t.Fatalf("slot %d has the names %v, want %v", slot, got, want[slot])
		}
		for rank := range uint32(64) {
			got, ok := table.appendPath(nil, slot, &k, rank)
			if path, named := pieceformat.NameOf(want[slot], rank); ok != named || string(got) != path {
				t.Fatalf("slot %d, rank %d: got the path %q (%t), want %q (%t)", slot, rank, got, ok, path, named)
			}
		}
	}
	for slot := range want {
		table.Remove(slot)
	}
	if n := len(table.dirs.number); n != 0 || table.dirs.bytes != 0 {
		t.Errorf("an empty table has %d directories of %d bytes", n, table.dirs.bytes)
	}
}

// TestTableBytes: a name takes at most 100 bytes, whether it follows from the key or not.
func TestTableBytes(t *testing.T) {
	const slots = 1 << 17
	r := rand.New(rand.NewPCG(5, 6))
	for name, path := range map[string]func(x string) string{
		"llmd": func(x string) string {
			return "meta-llama_Llama-3.1-8B_0123456789ab_r0/" + x[:3] + "/" + x[3:5] + "_g0/" + x + ".bin"
		},
		"random": func(string) string {
			return fmt.Sprintf("stripe-%d/%016x%016x%016x%016x.kv", r.Uint32N(64), r.Uint64(), r.Uint64(), r.Uint64(), r.Uint64())
		},
	} {
		var table nameTable
		for slot := range uint32(slots) {
			k := keyOf(r, 32)
			table.Add(slot, &k, pieceformat.Name{Rank: 0, Path: path(hex.EncodeToString(k[:]))})
		}
		per := float64(table.Memory()) / slots
		t.Logf("%s: %.1f bytes per name", name, per)
		if per > 100 {
			t.Errorf("%s: a name takes %.1f bytes, want at most 100", name, per)
		}
	}
}
