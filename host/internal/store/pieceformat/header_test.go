package pieceformat

import (
	"bytes"
	"encoding/binary"
	"errors"
	"flag"
	"os"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/zeebo/xxh3"
)

var update = flag.Bool("update", false, "write the golden files anew")

func goldenPlan(t testing.TB) *kv.Plan {
	t.Helper()
	p, err := kv.NewPlan(kv.Uniform(2, 1, 2, 300), []abi.Segment{
		{Plane: 0, Blocks: 2, PageLen: 300}, {Plane: 1, Blocks: 2, PageLen: 300, Gap: 424},
	})
	must(t, err)
	return p
}

func goldenHeader(t testing.TB) (Header, []byte) {
	plan := goldenPlan(t)
	image := make([]byte, DataOffset(len(plan.Extents()), false)+Padded(plan.PayloadBytes()))
	data := image[DataOffset(len(plan.Extents()), false):]
	for i := range plan.PayloadBytes() {
		data[i] = byte(i)
	}
	table := make([]uint64, len(plan.Extents()))
	kv.SumExtents(plan, 0, len(table), data, 0, table)
	h := Header{
		Namespace: kv.Digest{1, 2, 3}, Key: kv.Key{4, 5, 6}, Parent: kv.Key{7, 8}, Depth: 9, Group: 10, Rank: 1,
		Blocks: 2, Tenant: 12, Pieces: 3, StoreTime: 1_700_000_000_123_456_789, Payload: plan.PayloadBytes(),
		Plan:      plan.Digest(),
		Algorithm: kv.XXH3, Extent: kv.ExtentBytes, Extents: uint32(len(table)), DataOffset: DataOffset(len(table), false),
		TableSum: PutTable(image[Page:], table),
	}
	h.Encode(image)
	return h, image
}

// pinned is the golden file of a piece, which image must be equal to.
func pinned(t *testing.T, name string, image []byte) []byte {
	t.Helper()
	if *update {
		must(t, os.WriteFile(name, image, 0o644))
	}
	want, err := os.ReadFile(name)
	must(t, err)
	if !bytes.Equal(image, want) {
		t.Error("the format changed: a new layout needs a new version")
	}
	return want
}

// TestGoldenFile pins format version 1 byte for byte: every later host reads files of this version.
func TestGoldenFile(t *testing.T) {
	h, image := goldenHeader(t)
	want := pinned(t, "testdata/v1.piece", image)
	got, err := DecodeHeader(want)
	if err != nil || got != h {
		t.Fatalf("%+v, %v", got, err)
	}
	if got.FileBytes() != int64(len(want)) {
		t.Errorf("a file of %d bytes says %d", len(want), got.FileBytes())
	}
	table, err := got.ReadTable(want[Page:], nil)
	must(t, err)
	if err := kv.VerifyExtents(goldenPlan(t), 0, len(table), want[got.DataOffset:], 0, table); err != nil {
		t.Error(err)
	}
}

// resum makes a changed header's own checksum right again.
func resum(page []byte) {
	binary.LittleEndian.PutUint64(page[offSum:], headerSum(page))
}

// name gives a page a name.
func name(page []byte, path string) {
	page[offFlags], page[offNameLen] = flagNamed, byte(len(path))
	copy(page[offName:], path)
	resum(page)
}

// TestHeaderName: a name stands in the page, and a page without one is what it was before there were any.
func TestHeaderName(t *testing.T) {
	h, image := goldenHeader(t)
	h.Name = "model/" + strings.Repeat("x", 255) + "/a_r1.kv"
	h.Encode(image)
	got, err := DecodeHeader(image)
	if err != nil || got != h {
		t.Errorf("got %+v, %v, want %+v", got, err, h)
	}
}

func TestDecodeHeaderRefuses(t *testing.T) {
	le := binary.LittleEndian
	tests := []struct {
		name   string
		change func(page []byte) []byte
		want   error
	}{
		{"short", func(p []byte) []byte { return p[:Page-1] }, ErrDamaged},
		{"empty", func(p []byte) []byte { return nil }, ErrDamaged},
		{"zeros", func(p []byte) []byte { clear(p); return p }, ErrNotPiece},
		{"other magic", func(p []byte) []byte { p[0] ^= 1; return p }, ErrNotPiece},
		{"next version", func(p []byte) []byte { le.PutUint32(p[offVersion:], 3); return p }, ErrUnknownFormat},
		{"unknown flag", func(p []byte) []byte { p[offFlags+7] = 0x80; resum(p); return p }, ErrUnknownFormat},
		{"a name without its flag", func(p []byte) []byte { p[offNameLen] = 1; resum(p); return p }, ErrDamaged},
		{"a flag without its name", func(p []byte) []byte { p[offFlags] = flagNamed; resum(p); return p }, ErrDamaged},
		{"a name out of the root", func(p []byte) []byte { name(p, "../a"); return p }, ErrDamaged},
		{"a hidden name", func(p []byte) []byte { name(p, ".kvhost/lock"); return p }, ErrDamaged},
		{"a name that ends early", func(p []byte) []byte { name(p, "a/b"); p[offNameLen] = 2; resum(p); return p }, ErrUnknownFormat},
		{"a name too long", func(p []byte) []byte { name(p, "a"); p[offNameLen+1] = 16; resum(p); return p }, ErrDamaged},
		{"unknown algorithm", func(p []byte) []byte { p[offAlgorithm] = 2; resum(p); return p }, ErrUnknownFormat},
		{"unknown field", func(p []byte) []byte { p[Page-1] = 1; resum(p); return p }, ErrUnknownFormat},
		{"flipped bit", func(p []byte) []byte { p[offKey+3] ^= 4; return p }, ErrDamaged},
		{"flipped checksum", func(p []byte) []byte { p[offSum] ^= 4; return p }, ErrDamaged},
		{"no key", func(p []byte) []byte { clear(p[offKey : offKey+32]); resum(p); return p }, ErrDamaged},
		{"its own parent", func(p []byte) []byte { copy(p[offParent:], p[offKey:offKey+32]); resum(p); return p },
			ErrDamaged},
		{"rank out of range", func(p []byte) []byte { p[offRank] = 64; resum(p); return p }, ErrDamaged},
		{"rank not in pieces", func(p []byte) []byte { p[offRank] = 2; resum(p); return p }, ErrDamaged},
		{"no blocks", func(p []byte) []byte { p[offBlocks] = 0; resum(p); return p }, ErrDamaged},
		{"payload too long", func(p []byte) []byte { p[offPayload+6] = 1; resum(p); return p }, ErrDamaged},
		{"no extents", func(p []byte) []byte { p[offExtents] = 0; resum(p); return p }, ErrDamaged},
		{"table too long", func(p []byte) []byte { p[offExtents+3] = 0xff; resum(p); return p }, ErrDamaged},
		{"stored bytes in version 1", func(p []byte) []byte { p[offStored] = 1; resum(p); return p }, ErrUnknownFormat},
		{"payload in the table", func(p []byte) []byte { le.PutUint64(p[offDataOffset:], Page); resum(p); return p },
			ErrDamaged},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, image := goldenHeader(t)
			if _, err := DecodeHeader(tt.change(image[:Page])); !errors.Is(err, tt.want) {
				t.Errorf("got %v, want %v", err, tt.want)
			}
		})
	}
}

func FuzzDecodeHeader(f *testing.F) {
	_, image := goldenHeader(f)
	_, compressed := goldenCompressed(f)
	f.Add(image[:Page], true)
	f.Add(compressed[:Page], true)
	f.Add(image[:offEnd], false)
	named := bytes.Clone(image[:Page])
	name(named, "a/b.kv")
	f.Add(named, true)
	f.Fuzz(func(t *testing.T, b []byte, sign bool) {
		if sign && len(b) >= Page {
			resum(b) // or the fuzzer never gets past the checksum
		}
		h, err := DecodeHeader(b)
		if err != nil {
			if !IsDamage(err) {
				t.Fatalf("an error of no known kind: %v", err)
			}
			return
		}
		if h.FileBytes() < 3*Page || h.DataOffset > h.FileBytes() {
			t.Fatalf("%+v", h)
		}
		var again [Page]byte
		h.Encode(again[:])
		if !bytes.Equal(again[:], b[:Page]) {
			t.Fatal("decoded and encoded, it is another header")
		}
	})
}

func TestHeaderSumCoversThePage(t *testing.T) {
	_, image := goldenHeader(t)
	page := image[:Page]
	sum := headerSum(page)
	clear(page[offSum : offSum+8])
	if xxh3.Hash(page) != sum {
		t.Error("the checksum is not that of the page with a zero field")
	}
}

// must ends a test that cannot go on without what failed.
func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
