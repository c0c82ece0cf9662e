package pieceformat

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"flag"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/codec"
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
		t.Fatalf("the pinned header is decoded to %+v, error %v, want %+v", got, err, h)
	}
	if got.FileBytes() != int64(len(want)) {
		t.Errorf("a file of %d bytes says %d", len(want), got.FileBytes())
	}
	table, err := got.ReadTable(want[Page:], make([]uint64, 3, 64)) // of another piece
	must(t, err)
	if len(table) != int(got.Extents) {
		t.Errorf("a table of %d extents is read as %d", got.Extents, len(table))
	}
	must(t, kv.VerifyExtents(goldenPlan(t), 0, len(table), want[got.DataOffset:], 0, table))
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
	h.Extents, h.DataOffset = maxExtents, DataOffset(maxExtents, false)
	h.Encode(image)
	got, err := DecodeHeader(image)
	if err != nil || got != h {
		t.Errorf("a header with the longest name and table is decoded to %+v, error %v, want %+v", got, err, h)
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
				t.Errorf("decoding the header: error %v, want %v", err, tt.want)
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
			t.Fatalf("header %+v says that the file is too short", h)
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
var must = testenv.OK

// goldenCompressed is a piece of version 2: an extent that is stored as it is, and one of which every second byte is 42 and
// the others 43, as a codec for two byte planes encodes it.
func goldenCompressed(t testing.TB) (Header, []byte) {
	plan := goldenPlan(t)
	extents := plan.Extents()
	data := make([]byte, Padded(plan.PayloadBytes()))
	for i := range extents[0].Len {
		data[extents[0].Off+int64(i)] = byte(i)
	}
	for i := range extents[1].Len {
		data[extents[1].Off+int64(i)] = 42 + byte(i&1)
	}
	table := make([]uint64, len(extents))
	kv.SumExtents(plan, 0, len(table), data, 0, table)
	encoded := []byte{2, 2, 1, 0, 0, 0, 42, 43} // both planes are of one repeated byte; the first is stored in one byte
	stored := []Stored{
		{Sum: table[0], Len: uint32(extents[0].Len), Codec: uint8(codec.Raw)},
		{Sum: xxh3.Hash(encoded), Len: uint32(len(encoded)), Codec: uint8(codec.Planes)},
	}
	h, _ := goldenHeader(t)
	h.Stored, h.DataOffset = StoredBytes(stored), DataOffset(len(extents), true)
	image := make([]byte, h.FileBytes())
	h.TableSum = PutStored(image[Page:], table, stored)
	copy(image[h.DataOffset:], data[extents[0].Off:][:extents[0].Len])
	copy(image[h.DataOffset+int64(extents[0].Len):], encoded)
	h.Encode(image)
	return h, image
}

// TestGoldenCompressed pins format version 2 byte for byte.
func TestGoldenCompressed(t *testing.T) {
	h, image := goldenCompressed(t)
	want := pinned(t, "testdata/v2.piece", image)
	got, err := DecodeHeader(want)
	if err != nil || got != h || got.Version() != CompressedVersion {
		t.Fatalf("the pinned header is decoded to %+v, error %v, want %+v", got, err, h)
	}
	if got.FileBytes() != int64(len(want)) || got.MostBytes() != MostBytes(goldenPlan(t)) {
		t.Errorf("a file of %d bytes says %d, and %d at most", len(want), got.FileBytes(), got.MostBytes())
	}
	extents := goldenPlan(t).Extents()
	table, stored, err := got.ReadStored(want[Page:], extents, nil, nil)
	if err != nil || len(table) != 2 || stored[0].Codec != uint8(codec.Raw) || stored[1].Codec != uint8(codec.Planes) {
		t.Fatalf("the pinned table is read as %v and %+v, error %v, want a raw extent and one of planes", table, stored, err)
	}
	at := Offsets(stored, nil)
	for i, x := range stored {
		if xxh3.Hash(want[got.DataOffset:][at[i]:at[i+1]]) != x.Sum {
			t.Errorf("extent %d does not stand at %d", i, at[i])
		}
		page := make([]byte, extents[i].Len)
		if err := codec.Decode(page, want[got.DataOffset:][at[i]:at[i+1]], codec.Codec(x.Codec)); err != nil ||
			kv.Sum(page) != table[i] {
			t.Errorf("extent %d is decoded to other bytes: %v", i, err)
		}
	}
	if _, err := got.ReadTable(want[Page:], nil); err == nil {
		t.Error("its table was read as that of version 1")
	}
}

// TestVersionsAreNotMixed reads each version's header with the other one's number.
func TestVersionsAreNotMixed(t *testing.T) {
	_, v1 := goldenHeader(t)
	_, v2 := goldenCompressed(t)
	for _, image := range [][]byte{v1, v2} {
		image[offVersion] ^= 3
		resum(image)
		if h, err := DecodeHeader(image); !IsDamage(err) {
			t.Errorf("a header with the other version is decoded to %+v, error %v, want damage", h, err)
		}
	}
}

func TestReadStoredRefuses(t *testing.T) {
	le := binary.LittleEndian
	row := func(b []byte, i int) []byte { return b[storedBytes*i:] }
	for _, tt := range []struct {
		name   string
		change func(b []byte)
		want   error
	}{
		{"unknown codec", func(b []byte) { row(b, 1)[20] = 3 }, ErrUnknownFormat},
		{"bytes beside the codec", func(b []byte) { row(b, 1)[23] = 1 }, ErrUnknownFormat},
		{"nothing stored", func(b []byte) { le.PutUint32(row(b, 1)[16:], 0) }, ErrDamaged},
		{"longer than its pages", func(b []byte) { le.PutUint32(row(b, 1)[16:], 601) }, ErrDamaged},
		{"longer than the header says", func(b []byte) { le.PutUint32(row(b, 1)[16:], 9) }, ErrDamaged},
		{"raw and shorter", func(b []byte) { le.PutUint32(row(b, 0)[16:], 599) }, ErrDamaged},
		{"raw with another checksum", func(b []byte) { row(b, 0)[8] ^= 1 }, ErrDamaged},
	} {
		t.Run(tt.name, func(t *testing.T) {
			h, image := goldenCompressed(t)
			b := image[Page:h.DataOffset]
			tt.change(b)
			extents := goldenPlan(t).Extents()
			if _, _, err := h.ReadStored(b, extents, nil, nil); !errors.Is(err, ErrDamaged) {
				t.Errorf("a changed table gave %v", err)
			}
			h.TableSum = xxh3.Hash(b[:storedBytes*len(extents)])
			if _, _, err := h.ReadStored(b, extents, nil, nil); !errors.Is(err, tt.want) {
				t.Errorf("reading the table: error %v, want %v", err, tt.want)
			}
		})
	}
	h, image := goldenCompressed(t)
	if _, _, err := h.ReadStored(image[Page:], goldenPlan(t).Extents()[:1], nil, nil); !errors.Is(err, ErrDamaged) {
		t.Errorf("a table for another plan gave %v", err)
	}
}

// FuzzReadStored reads tables with the right checksum and total.
func FuzzReadStored(f *testing.F) {
	h, image := goldenCompressed(f)
	extents := goldenPlan(f).Extents()
	f.Add(image[Page:h.DataOffset], h.Stored)
	f.Add(image[Page:][:storedBytes], h.Stored)
	f.Fuzz(func(t *testing.T, b []byte, total int64) {
		h := h
		if h.Stored = total; len(b) >= storedBytes*len(extents) {
			h.TableSum = xxh3.Hash(b[:storedBytes*len(extents)])
		}
		table, stored, err := h.ReadStored(b, extents, nil, nil)
		if err != nil {
			if !IsDamage(err) {
				t.Fatalf("an error of no known kind: %v", err)
			}
			return
		}
		at := Offsets(stored, nil)
		if at[len(extents)] != total || StoredBytes(stored) != total {
			t.Fatalf("%+v are %d bytes, want %d", stored, at[len(extents)], total)
		}
		for i, e := range extents {
			if n := at[i+1] - at[i]; n < 1 || n > int64(e.Len) {
				t.Fatalf("extent %d has %d bytes of %d", i, n, e.Len)
			}
		}
		again := make([]byte, h.DataOffset-Page)
		if PutStored(again, table, stored) != h.TableSum || !bytes.Equal(again[:storedBytes*len(extents)], b[:storedBytes*len(extents)]) {
			t.Fatal("read and written, it is another table")
		}
	})
}

// file is a file in memory.
type file []byte

func (f *file) WriteAt(p []byte, off int64) (int, error) {
	for int64(len(*f)) < off+int64(len(p)) {
		*f = append(*f, 0)
	}
	return copy((*f)[off:], p), nil
}

// TestFormatExamples compares the examples of docs/formats.md with what is written. A difference is a new format: see the
// section on how to change one.
func TestFormatExamples(t *testing.T) {
	text, err := os.ReadFile("testdata/examples.txt")
	must(t, err)
	_, piece := goldenHeader(t)
	_, compressed := goldenCompressed(t)
	for name, image := range map[string][]byte{
		"header":     piece[:offEnd],
		"stored":     compressed[Page:][:2*storedBytes],
		"checkpoint": exampleCheckpoint(t),
		"state":      (&State{Time: 5, Slots: 3, Format: "lru/1", Data: []byte{1, 2, 3}}).Encode(),
		"written":    EncodeWritten(20_000, 4096),
		"plan":       goldenPlan(t).Encoded(),
	} {
		if dump := hex.Dump(image); !strings.Contains("\n"+string(text)+"\n", "\n"+name+"\n"+dump+"\n") {
			t.Errorf("testdata/examples.txt does not have this as %s:\n%s", name, dump)
		}
	}
}

func exampleCheckpoint(t *testing.T) []byte {
	var key kv.Key
	for i := range key {
		key[i] = byte(0xa0 + i)
	}
	short := key
	clear(short[16:])
	owners := []CheckpointOwner{
		{Namespace: kv.Digest{1, 2, 3}, Group: 4, Tenant: 5, TTL: time.Second},
	}
	entries := []*CheckpointEntry{
		{Slot: 0, State: StateComplete, LastTouch: 9, Units: 10, Depth: 11, Pieces: 3, Key: short},
		{
			Slot: 2, State: StateNamed, Parent: 0x1112131415161718, LastTouch: 8, Units: 10, Depth: 12, Pieces: 1 << 9,
			Missing: 2, Expires: 0x21222324, Key: key, Names: []Name{{Rank: 9, Path: "a/b"}},
		},
	}
	var f file
	err := WriteCheckpoint(&f, Checkpoint{Time: 7, High: 3, Clock: 9, Entries: 2}, owners,
		func(yield func(*CheckpointEntry) bool) {
			for _, e := range entries {
				if !yield(e) {
					return
				}
			}
		})
	must(t, err)
	return f
}

// collector keeps what a checkpoint has.
type collector struct {
	owners  []CheckpointOwner
	entries []CheckpointEntry
}

func (c *collector) Head(Checkpoint) error          { return nil }
func (c *collector) Owner(o *CheckpointOwner) error { c.owners = append(c.owners, *o); return nil }
func (c *collector) Entry(e *CheckpointEntry) error { c.entries = append(c.entries, *e); return nil }

// TestDecodeWhatWasEncoded reads the examples back.
func TestDecodeWhatWasEncoded(t *testing.T) {
	image := exampleCheckpoint(t)
	var c collector
	head, err := ReadCheckpoint(strings.NewReader(string(image)), int64(len(image)), &c)
	if err != nil || head.Entries != 2 || len(c.owners) != 1 || len(c.entries) != 2 {
		t.Fatalf("%+v, %d owners, %d entries, %v", head, len(c.owners), len(c.entries), err)
	}
	if e := c.entries[1]; e.Missing != 2 || e.Expires != 0x21222324 || e.Pieces != 1<<9 || e.Key[31] != 0xbf ||
		e.State != StateNamed || !slices.Equal(e.Names, []Name{{Rank: 9, Path: "a/b"}}) {
		t.Errorf("the second entry is read as %+v, want what was written", e)
	}
}

// FuzzState reads states with the right checksum, and writes them again.
func FuzzState(f *testing.F) {
	f.Add((&State{Time: 1, Slots: 2, Format: "lru1", Data: []byte("abc")}).Encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) >= stateHead {
			binary.LittleEndian.PutUint64(b[stateHead-8:], xxh3.Hash(b[stateHead:]))
		}
		s, err := DecodeState(b)
		if checked := CheckState(bytes.NewReader(b), int64(len(b))); (checked == nil) != (err == nil) {
			t.Fatalf("decoding says %v, checking %v", err, checked)
		}
		if err == nil && !bytes.Equal(s.Encode(), b) {
			t.Fatalf("%+v reads back as another file", s)
		}
	})
}

// FuzzWritten reads counts of bytes that no clock and no writer can have made.
func FuzzWritten(f *testing.F) {
	f.Add(EncodeWritten(20000, 1<<40))
	f.Add([]byte("1 -5\n"))
	f.Add([]byte("1 5\nmore"))
	f.Fuzz(func(t *testing.T, b []byte) {
		day, n, err := DecodeWritten(b)
		if err == nil && (day < 0 || n < 0 || !slices.Equal(EncodeWritten(day, n), b)) {
			t.Fatalf("%q is %d bytes on day %d", b, n, day)
		}
	})
}
