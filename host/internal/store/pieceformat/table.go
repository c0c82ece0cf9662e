package pieceformat

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/kvhost/kvhost/host/internal/codec"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/zeebo/xxh3"
)

// The table of a piece holds a checksum for each extent of its plan. In version 2 it also describes how the extent is stored.

// PutTable writes a checksum table to dst, padded with zeros to whole pages, and returns the checksum of the table.
func PutTable(dst []byte, table []uint64) uint64 {
	for i, v := range table {
		binary.LittleEndian.PutUint64(dst[8*i:], v)
	}
	n := 8 * len(table)
	clear(dst[n:Padded(int64(n))])
	return xxh3.Hash(dst[:n])
}

// ReadTable appends the checksums of the extents to dst[:0]. b starts at the table.
func (h *Header) ReadTable(b []byte, dst []uint64) ([]uint64, error) {
	if int64(len(b)) < h.DataOffset-Page {
		return nil, fmt.Errorf("%w: %d bytes of a checksum table of %d", ErrDamaged, len(b), h.DataOffset-Page)
	}
	b = b[:8*int(h.Extents)]
	if got := xxh3.Hash(b); got != h.TableSum {
		return nil, fmt.Errorf("%w: table checksum %016x, the header says %016x", ErrDamaged, got, h.TableSum)
	}
	dst = dst[:0]
	for ; len(b) > 0; b = b[8:] {
		dst = append(dst, binary.LittleEndian.Uint64(b))
	}
	return dst, nil
}

// Stored describes an extent in a file of version 2.
type Stored struct {
	Sum   uint64 // checksum of the stored bytes
	Len   uint32 // number of stored bytes
	Codec uint8  // [codec.Codec]
}

// EncodeExtent writes the stored form of an extent to dst, which is as long as the extent. sum is the checksum of its page bytes.
func EncodeExtent(dst, page []byte, element int, sum uint64) Stored {
	n, by := codec.Encode(dst, page, element)
	if by != codec.Raw {
		sum = kv.Sum(dst[:n])
	}
	return Stored{Sum: sum, Len: uint32(n), Codec: uint8(by)}
}

// storedBytes is the size of a row in the table of version 2: the checksums of the original and of the stored bytes, the stored
// length, the codec, and three zero bytes.
const storedBytes = 24

// PutStored writes the table of a file of version 2 to dst, padded with zeros to whole pages, and returns the checksum of the
// table.
func PutStored(dst []byte, table []uint64, stored []Stored) uint64 {
	le := binary.LittleEndian
	for i, x := range stored {
		row := dst[storedBytes*i : storedBytes*(i+1)]
		le.PutUint64(row, table[i])
		le.PutUint64(row[8:], x.Sum)
		le.PutUint32(row[16:], x.Len)
		le.PutUint32(row[20:], uint32(x.Codec))
	}
	n := storedBytes * len(stored)
	clear(dst[n:Padded(int64(n))])
	return xxh3.Hash(dst[:n])
}

// ReadStored appends the checksums of the extents to table[:0], and their stored form to stored[:0]. b starts at the table.
// extents are the extents of the piece's plan. A result without an error is consistent with the plan and the header: no extent
// is longer than in the plan, and the stored lengths add up to the length in the header.
func (h *Header) ReadStored(
	b []byte, extents []kv.Extent, table []uint64, stored []Stored,
) ([]uint64, []Stored, error) {
	if int64(len(b)) < h.DataOffset-Page || len(extents) != int(h.Extents) {
		return nil, nil, fmt.Errorf("%w: %d bytes of a table of %d, for %d extents of %d", ErrDamaged, len(b),
			h.DataOffset-Page, len(extents), h.Extents)
	}
	b = b[:storedBytes*int(h.Extents)]
	if got := xxh3.Hash(b); got != h.TableSum {
		return nil, nil, fmt.Errorf("%w: table checksum %016x, the header says %016x", ErrDamaged, got, h.TableSum)
	}
	table, stored = table[:0], stored[:0]
	le, sum := binary.LittleEndian, int64(0)
	for i, e := range extents {
		row := b[storedBytes*i : storedBytes*(i+1)]
		page, by := le.Uint64(row), le.Uint32(row[20:])
		x := Stored{Sum: le.Uint64(row[8:]), Len: le.Uint32(row[16:]), Codec: uint8(by)}
		switch {
		case by > math.MaxUint8 || !codec.Known(codec.Codec(by)):
			return nil, nil, fmt.Errorf("%w: extent %d has the codec %#x", ErrUnknownFormat, i, by)
		case x.Len == 0 || x.Len > uint32(e.Len):
			return nil, nil, fmt.Errorf("%w: extent %d has %d stored bytes of %d", ErrDamaged, i, x.Len, e.Len)
		case codec.Codec(by) == codec.Raw && (x.Len != uint32(e.Len) || x.Sum != page):
			return nil, nil, fmt.Errorf("%w: extent %d is stored as it is, with %d of %d bytes and the checksums %016x "+
				"and %016x", ErrDamaged, i, x.Len, e.Len, page, x.Sum)
		}
		table, stored = append(table, page), append(stored, x)
		sum += int64(x.Len)
	}
	if sum != h.Stored {
		return nil, nil, fmt.Errorf("%w: extents of %d stored bytes, the header says %d", ErrDamaged, sum, h.Stored)
	}
	return table, stored, nil
}

// Offsets appends the offset of each stored extent from the start of the payload to dst[:0], followed by the end of the last
// one.
func Offsets(stored []Stored, dst []int64) []int64 {
	at, dst := int64(0), dst[:0]
	for _, x := range stored {
		dst = append(dst, at)
		at += int64(x.Len)
	}
	return append(dst, at)
}

// StoredBytes returns the sum of the stored lengths.
func StoredBytes(stored []Stored) (sum int64) {
	for _, x := range stored {
		sum += int64(x.Len)
	}
	return sum
}
