package store

import (
	"bytes"
	"encoding/binary"
	"testing"

	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/zeebo/xxh3"
)

// FuzzCheckpoint reads files with the right checksums.
func FuzzCheckpoint(f *testing.F) {
	fp := func(_ uint16, k kv.Key) uint64 { return kv.Fingerprint(kv.Digest{}, 0, k) }
	plain := func() *index.Index { return index.New(64, fp, func(class uint16) uint16 { return class }) }
	x := plain()
	for n := range uint64(20) {
		k := kv.Key{byte(n), byte(n >> 1), 1, byte(n % 2 << 7), 31: byte(n % 3)}
		slot := x.Add(fp(5, k), index.Owner{Class: 5}, &k, n, uint32(n))
		x.SetPieces(slot, 1<<(n%64))
		x.Touch(slot)
	}
	var file memory
	if err := writeCheckpoint(&file, x, 9, []pieceformat.CheckpointOwner{{Group: 1}}); err != nil {
		f.Fatal(err)
	}
	f.Add([]byte(file))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) >= 64 {
			binary.LittleEndian.PutUint64(b[48:], xxh3.Hash(b[64:]))
			binary.LittleEndian.PutUint64(b[56:], xxh3.Hash(b[:56]))
		}
		y := plain()
		owner := func(*pieceformat.CheckpointOwner) (index.Owner, error) { return index.Owner{Class: 5}, nil }
		c, err := readCheckpoint(bytes.NewReader(b), int64(len(b)), y, owner)
		if err != nil {
			return
		}
		if y.Len() != c.Entries || y.High() != c.High {
			t.Fatalf("%d entries in %d slots, the head says %+v", y.Len(), y.High(), c)
		}
		if err := y.Check(); err != nil {
			t.Fatal(err)
		}
	})
}

// memory is a file.
type memory []byte

func (m *memory) WriteAt(p []byte, off int64) (int, error) {
	for int64(len(*m)) < off+int64(len(p)) {
		*m = append(*m, 0)
	}
	return copy((*m)[off:], p), nil
}
