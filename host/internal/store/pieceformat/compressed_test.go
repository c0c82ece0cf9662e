package pieceformat

import (
	"bytes"
	"encoding/binary"
	"errors"
	"testing"

	"github.com/kvhost/kvhost/host/internal/codec"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/zeebo/xxh3"
)

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
		t.Fatalf("%+v, %v", got, err)
	}
	if got.FileBytes() != int64(len(want)) || got.MostBytes() != MostBytes(goldenPlan(t)) {
		t.Errorf("a file of %d bytes says %d, and %d at most", len(want), got.FileBytes(), got.MostBytes())
	}
	extents := goldenPlan(t).Extents()
	table, stored, err := got.ReadStored(want[Page:], extents, nil, nil)
	if err != nil || len(table) != 2 || stored[0].Codec != uint8(codec.Raw) || stored[1].Codec != uint8(codec.Planes) {
		t.Fatalf("%v, %+v, %v", table, stored, err)
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
			t.Errorf("%+v, %v", h, err)
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
				t.Errorf("got %v, want %v", err, tt.want)
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
