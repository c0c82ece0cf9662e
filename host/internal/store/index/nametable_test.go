package index

import (
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
)

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
