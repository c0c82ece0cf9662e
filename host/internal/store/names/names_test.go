package names

import (
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/plugins/fanout"
)

func keyOf(r *rand.Rand, bytes int) (k kv.Key) {
	for i := range bytes {
		k[i] = byte(r.Uint32())
	}
	return k
}

// TestBuiltin: the built-in name is what fanout without settings answers.
func TestBuiltin(t *testing.T) {
	const text = "model=a\n"
	p, err := fanout.New(guest.Info{MaxNamespaces: 1})
	if err != nil {
		t.Fatal(err)
	}
	p.Namespace(0, text)
	r := rand.New(rand.NewPCG(1, 2))
	for i := range 200 {
		q := abi.PlaceQuery{KeyLen: []uint32{16, 32, 20}[i%3], Group: r.Uint32N(20), Rank: r.Uint32N(64)}
		k := keyOf(r, int(q.KeyLen))
		q.Key = k
		want, _ := p.Place(&q, nil, nil)
		got := AppendBuiltin([]byte("x"), kv.TextDigest([]byte(text)), q.KeyLen, &k, q.Group, q.Rank)
		if string(got) != "x"+string(want) {
			t.Fatalf("got the built-in name %s, want %s", got, want)
		}
		if !IsBuiltin(want) {
			t.Errorf("%s is not read as a built-in name", want)
		}
	}
}

func TestIsBuiltin(t *testing.T) {
	ns := strings.Repeat("0123456789abcdef", 2)
	for path, want := range map[string]bool{
		ns + "/ab/c/abcdef0123456789_g0_r0.kv":  true,
		ns + "/ab/d/abcdef0123456789_g0_r0.kv":  false,
		ns + "/ab/c/ABCDEF0123456789_g0_r0.kv":  false,
		ns + "/ab/c/abcdef0123456789_g00_r0.kv": false,
		ns + "/ab/c/abcdef0123456789_g0_r0.kvx": false,
		ns + "/ab/c/abcdef0123456789_g0.kv":     false,
		ns + "/ab/c/_g0_r0.kv":                  false,
		ns + "/ab/c/":                           false,
		"":                                      false,
		"a":                                     false,
	} {
		if got := IsBuiltin([]byte(path)); got != want {
			t.Errorf("got %t for %q, want %t", got, path, want)
		}
	}
}

func TestReserved(t *testing.T) {
	ns := strings.Repeat("0123456789abcdef", 2)
	for path, want := range map[string]bool{
		ns:                                       true,
		ns + "/ab":                               true,
		ns + "/ab/c":                             true,
		ns + "/ab/c/abcdef0123456789_g0_r0.kv":   true,
		ns + "/ab/c/abcdef0123456789_g0_r0.kv/x": true,
		ns + "/ab/c/abcdef0123456789_g0_r0":      false,
		ns + "/abc/abcdef0123456789_g0_r0.kv":    false,
		ns + "/abcd":                             false,
		ns[1:] + "/ab":                           false,
		"model/ab/c":                             false,
		"a":                                      false,
	} {
		if got := Reserved([]byte(path)); got != want {
			t.Errorf("got %t for %q, want %t", got, path, want)
		}
	}
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
	var table Table
	keys, want := map[uint32]kv.Key{}, map[uint32][]Name{}
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
		n := Name{rank, list[r.IntN(len(list))]}
		table.Add(slot, &k, n)
		want[slot] = append(want[slot], n)
	}
	for slot := range uint32(15_000) {
		k := keys[slot]
		if got := table.List(slot, &k); !slices.Equal(got, want[slot]) {
			t.Fatalf("slot %d has the names %v, want %v", slot, got, want[slot])
		}
		for rank := range uint32(64) {
			got, ok := table.AppendPath(nil, slot, &k, rank)
			if path, named := Of(want[slot], rank); ok != named || string(got) != path {
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
		var table Table
		for slot := range uint32(slots) {
			k := keyOf(r, 32)
			table.Add(slot, &k, Name{0, path(hex.EncodeToString(k[:]))})
		}
		per := float64(table.Memory()) / slots
		t.Logf("%s: %.1f bytes per name", name, per)
		if per > 100 {
			t.Errorf("%s: a name takes %.1f bytes, want at most 100", name, per)
		}
	}
}

func TestList(t *testing.T) {
	want := []Name{{3, "a/b"}, {0, "c"}, {3, "d"}}
	b := AppendList(nil, want)
	if got, err := DecodeList(b); err != nil || !slices.Equal(got, want) || len(b) != ListBytes(want) {
		t.Errorf("got %v, %v from %d bytes, want %v from %d", got, err, len(b), want, ListBytes(want))
	}
	for _, bad := range [][]Name{{{64, "a"}}, {{0, "../a"}}, {{0, "/a"}}, {{0, ""}}, {{0, ".kvhost/lock"}}, {{0, "a b"}}} {
		if got, err := DecodeList(AppendList(nil, bad)); err == nil {
			t.Errorf("a list with %v is read as %v", bad, got)
		}
	}
	for n := 1; n < len(b); n++ {
		if n != 6 && n != 10 { // where a name ends
			if got, err := DecodeList(b[:n]); err == nil {
				t.Errorf("%d of %d bytes are read as %v", n, len(b), got)
			}
		}
	}
}

func FuzzDecodeList(f *testing.F) {
	f.Add(AppendList(nil, []Name{{3, "a/b"}, {0, "c"}}))
	f.Fuzz(func(t *testing.T, b []byte) {
		list, err := DecodeList(b)
		if err == nil && string(AppendList(nil, list)) != string(b) {
			t.Errorf("%x is read as %v, which is written in another way", b, list)
		}
	})
}

func BenchmarkPath(b *testing.B) {
	r := rand.New(rand.NewPCG(7, 8))
	k := keyOf(r, 32)
	var table Table
	table.Add(7, &k, Name{1, paths(r, k, 1)[0]})
	var room [MaxPath]byte
	b.Run("table", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			table.AppendPath(room[:0], 7, &k, 1)
		}
	})
	b.Run("built-in", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			AppendBuiltin(room[:0], kv.Digest{1}, 32, &k, 0, 1)
		}
	})
}
