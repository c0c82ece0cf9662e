package shared

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"

	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/zeebo/xxh3"
)

// Op is the kind of a log record.
type Op uint8

const (
	Published Op = 1 + iota // a piece was published
	Damaged                 // an entry has an unreadable piece: evict it
	Touched                 // entries were used
	Relayed                 // a piece of a dead member that had not logged it; spends no credit
)

// Record is one record of a member's log.
type Record struct {
	Op        Op
	Names     []pieceformat.Name // names of the files, where they are not the built-in ones
	Namespace kv.Digest
	Group     uint32
	Rank      uint32
	Key       kv.Key
	Parent    kv.Key
	Depth     uint32
	Tenant    uint32
	Pieces    uint64 // in Published, the ranks that make the entry complete; in Damaged, the ranks to remove
	Bytes     int64  // allocated bytes on disk
	StoreTime int64

	Fingerprints []uint64 // set in Touched only, where it is the only field; at most recordFingerprints
}

// Offsets of the fields of a record, which the list of names follows. Numbers are little-endian; unused bytes are zero.
const (
	recordBytes        = 160
	recordFingerprints = 16

	recOp           = 0
	recFingerprints = 2 // u8: number of fingerprints
	recRank         = 4
	recGroup        = 8
	recDepth        = 12
	recTenant       = 16
	recBody         = 24 // start of the fingerprints of Touched
	recPieces       = 24
	recSize         = 32
	recTime         = 40
	recNamespace    = 48
	recKey          = 64
	recParent       = 96
	recNames        = 128 // u32: length of the list of names
	recSum          = 152
	maxNames        = 1 << 17

	// mostBytes and mostTotal are the largest byte count and the largest running total of the protocol. Sums of them do not
	// overflow.
	mostBytes = 1 << 56
	mostTotal = 1 << 61
)

// Append encodes a record at the end of b.
func (r *Record) Append(b []byte) []byte {
	var a [recordBytes]byte
	le := binary.LittleEndian
	a[recOp] = byte(r.Op)
	if r.Op == Touched {
		a[recFingerprints] = byte(len(r.Fingerprints))
		for i, p := range r.Fingerprints {
			le.PutUint64(a[recBody+8*i:], p)
		}
	} else {
		le.PutUint32(a[recNames:], uint32(pieceformat.NamesBytes(r.Names)))
		le.PutUint32(a[recRank:], r.Rank)
		le.PutUint32(a[recGroup:], r.Group)
		le.PutUint32(a[recDepth:], r.Depth)
		le.PutUint32(a[recTenant:], r.Tenant)
		le.PutUint64(a[recPieces:], r.Pieces)
		le.PutUint64(a[recSize:], uint64(r.Bytes))
		le.PutUint64(a[recTime:], uint64(r.StoreTime))
		copy(a[recNamespace:], r.Namespace[:])
		copy(a[recKey:], r.Key[:])
		copy(a[recParent:], r.Parent[:])
	}
	at := len(b)
	b = pieceformat.AppendNames(append(b, a[:]...), r.Names)
	le.PutUint64(b[at+recSum:], recordSum(b[at:]))
	return b
}

// recordSum returns the checksum of a record with its names.
func recordSum(a []byte) uint64 {
	sum := xxh3.Hash(a[:recSum])
	if len(a) > recordBytes {
		sum = xxh3.HashSeed(a[recordBytes:], sum)
	}
	return sum
}

// DecodeRecord decodes the first record of a, and returns its length. It returns ErrDamaged if the record is cut off or partly
// written.
func DecodeRecord(a []byte) (r Record, n int, err error) {
	le := binary.LittleEndian
	if n = recordBytes; len(a) >= n && Op(a[recOp]) != Touched {
		n += int(min(le.Uint32(a[recNames:]), maxNames+1))
	}
	if len(a) < n || n > recordBytes+maxNames {
		return r, n, fmt.Errorf("%w: a record of %d bytes in %d", ErrDamaged, n, len(a))
	}
	a = a[:n]
	if recordSum(a) != le.Uint64(a[recSum:]) {
		return r, n, fmt.Errorf("%w: a record's checksum", ErrDamaged)
	}
	r, err = decodeFields(a)
	return r, n, err
}

func decodeFields(a []byte) (r Record, err error) {
	le := binary.LittleEndian
	r.Op = Op(a[recOp])
	switch r.Op {
	case Touched:
		n := int(a[recFingerprints])
		if n == 0 || n > recordFingerprints {
			return r, fmt.Errorf("%w: %d touches in a record", ErrDamaged, n)
		}
		for i := range n {
			r.Fingerprints = append(r.Fingerprints, le.Uint64(a[recBody+8*i:]))
		}
		return r, nil
	case Published, Damaged, Relayed:
	default:
		return r, fmt.Errorf("%w: a record of kind %d", ErrDamaged, r.Op)
	}
	r.Rank, r.Group = le.Uint32(a[recRank:]), le.Uint32(a[recGroup:])
	r.Depth, r.Tenant = le.Uint32(a[recDepth:]), le.Uint32(a[recTenant:])
	r.Pieces, r.Bytes, r.StoreTime = le.Uint64(a[recPieces:]), int64(le.Uint64(a[recSize:])), int64(le.Uint64(a[recTime:]))
	copy(r.Namespace[:], a[recNamespace:])
	copy(r.Key[:], a[recKey:])
	copy(r.Parent[:], a[recParent:])
	if r.Bytes < 0 || r.Bytes > mostBytes || r.Rank >= kv.MaxRanks || r.Key == kv.Root {
		return r, fmt.Errorf("%w: a record of %d bytes, rank %d, key %s", ErrDamaged, r.Bytes, r.Rank, r.Key)
	}
	if r.Names, err = pieceformat.DecodeNames(a[recordBytes:]); err != nil {
		return r, fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	return r, nil
}

// Victim is an entry to be evicted.
type Victim struct {
	Namespace kv.Digest
	Group     uint32
	Key       kv.Key
	Pieces    uint64             // ranks whose files are to be removed
	Names     []pieceformat.Name // names of the files: all names of a rank, or none if its only name is the built-in one
	Bytes     int64
}

type ID struct {
	Namespace kv.Digest
	Group     uint32
	Key       kv.Key
}

// Compare orders entries, so that a host's actions have an order that tests can reproduce.
func (a ID) Compare(b ID) int {
	return cmp.Or(bytes.Compare(a.Namespace[:], b.Namespace[:]), cmp.Compare(a.Group, b.Group), bytes.Compare(a.Key[:], b.Key[:]))
}

func (v *Victim) ID() ID { return ID{v.Namespace, v.Group, v.Key} }

// Victim returns the entry of a record as a victim.
func (r *Record) Victim() Victim {
	return Victim{Namespace: r.Namespace, Group: r.Group, Key: r.Key, Pieces: r.Pieces, Names: r.Names, Bytes: r.Bytes}
}

func (r *Record) ID() ID { return ID{r.Namespace, r.Group, r.Key} }
