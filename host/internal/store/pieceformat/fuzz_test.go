package pieceformat

import (
	"bytes"
	"encoding/binary"
	"slices"
	"testing"

	"github.com/zeebo/xxh3"
)

// buffer is a file.
type buffer []byte

func (b *buffer) WriteAt(p []byte, off int64) (int, error) {
	if grow := int(off) + len(p) - len(*b); grow > 0 {
		*b = append(*b, make([]byte, grow)...)
	}
	return copy((*b)[off:], p), nil
}

// FuzzTouches reads lists with the right checksum, and writes them again.
func FuzzTouches(f *testing.F) {
	var file buffer
	must(f, WriteTouches(&file, 7, 3, func(i int) uint64 { return uint64(i) << 40 }))
	f.Add([]byte(file))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) >= touchesHead {
			binary.LittleEndian.PutUint64(b[24:], xxh3.Hash(b[touchesHead:]))
		}
		var list []uint64
		when, err := ReadTouches(bytes.NewReader(b), int64(len(b)), func(part []uint64) { list = append(list, part...) })
		if err != nil {
			return
		}
		var again buffer
		if err := WriteTouches(&again, when, len(list), func(i int) uint64 { return list[i] }); err != nil || !bytes.Equal(again, b) {
			t.Fatalf("%d touches read back as another file: %v", len(list), err)
		}
	})
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
