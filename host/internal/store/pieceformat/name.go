package pieceformat

import (
	"encoding/binary"
	"fmt"

	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/kv"
)

// Name is one rank's file of an entry, where it has another name than the built-in one.
type Name struct {
	Rank uint32
	Path string // below the root
}

// MaxPath is the longest path of a name in bytes.
const MaxPath = policy.MaxPath

// CheckName returns an error for a path that no name can have: one that leads out of the root or to a hidden file, is too
// long, or holds bytes that some file system refuses.
func CheckName(path string) error { return policy.CheckPath([]byte(path)) }

// A list of names is encoded as, for each, its rank (1 byte), the path's length (2) and the path.
const listHead = 3

// AppendNames encodes names.
func AppendNames(b []byte, list []Name) []byte {
	for _, n := range list {
		b = append(b, byte(n.Rank))
		b = binary.LittleEndian.AppendUint16(b, uint16(len(n.Path)))
		b = append(b, n.Path...)
	}
	return b
}

// NamesBytes is how long an encoded list is.
func NamesBytes(list []Name) (n int) {
	for i := range list {
		n += listHead + len(list[i].Path)
	}
	return n
}

// DecodeNames decodes names, and refuses a list with a path that no name can have.
func DecodeNames(b []byte) (list []Name, err error) {
	for len(b) > 0 {
		if len(b) < listHead {
			return nil, fmt.Errorf("a list of names ends after %d bytes of a name", len(b))
		}
		rank, size := uint32(b[0]), int(binary.LittleEndian.Uint16(b[1:]))
		if b = b[listHead:]; rank >= kv.MaxRanks || size > len(b) {
			return nil, fmt.Errorf("a list of names has rank %d and a path of %d bytes in %d", rank, size, len(b))
		}
		if err := policy.CheckPath(b[:size]); err != nil {
			return nil, err
		}
		list = append(list, Name{rank, string(b[:size])})
		b = b[size:]
	}
	return list, nil
}

// NameOf is the path of a rank's name in a list; ok is false for a piece with the built-in name. A piece can have several
// names where hosts stored it at the same time: the first is the one to read.
func NameOf(list []Name, rank uint32) (path string, ok bool) {
	for i := range list {
		if list[i].Rank == rank {
			return list[i].Path, true
		}
	}
	return "", false
}
