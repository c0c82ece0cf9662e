package pieceformat

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/zeebo/xxh3"
)

// Page is the unit of a piece file. Header, table and payload each start at a page boundary and fill whole pages.
const Page = abi.SizeUnit

// Versions of piece files. Both are read and written.
const (
	FormatVersion     = 1 // the payload is the bytes of the pages
	CompressedVersion = 2 // each extent is stored separately, most of them compressed
)

// headerMagic is the first bytes of every piece file, in every version.
const headerMagic = "kvhostP\n"

// Header is the content of the first page of a piece file.
type Header struct {
	Namespace  kv.Digest
	Key        kv.Key
	Parent     kv.Key // kv.Root for the first chunk of a prefix
	Depth      uint32
	Group      uint32
	Rank       uint32
	Blocks     uint32
	Tenant     uint32
	Pieces     uint64 // ranks of the pieces that make the entry complete, as bits
	StoreTime  int64  // time of the reservation in nanoseconds since 1970
	Payload    int64  // bytes of the payload before compression, with gaps
	Plan       kv.Digest
	Algorithm  kv.Algorithm
	Extent     uint32 // most bytes under one checksum
	Extents    uint32 // number of checksums in the table
	TableSum   uint64 // checksum of the table
	DataOffset int64  // offset of the payload
	Stored     int64  // bytes of the extents as stored, without padding; 0 in version 1
	Name       string // path below the root if a place policy named the piece; empty for the built-in name
}

// Offsets of the header's fields, little-endian. All other bytes are zero.
const (
	offMagic      = 0   // [8]byte
	offVersion    = 8   // u32
	offAlgorithm  = 12  // u32
	offNamespace  = 16  // [16]byte
	offKey        = 32  // [32]byte
	offParent     = 64  // [32]byte
	offDepth      = 96  // u32
	offGroup      = 100 // u32
	offRank       = 104 // u32
	offBlocks     = 108 // u32
	offTenant     = 112 // u32
	offExtent     = 116 // u32
	offPieces     = 120 // u64
	offStoreTime  = 128 // i64
	offPayload    = 136 // u64
	offPlan       = 144 // [16]byte
	offFlags      = 160 // u64: flagNamed
	offExtents    = 168 // u32
	offNameLen    = 172 // u32: length of the name, if flagNamed is set
	offDataOffset = 176 // u64
	offTableSum   = 184 // u64
	offSum        = 192 // u64: xxh3-64 of the page with this field zero
	offEnd        = 200
	offStored     = 200 // u64, version 2 only
	offName       = 208 // name, if flagNamed is set
)

// flagNamed means that the piece has a name other than the built-in one.
const flagNamed = 1

// Padded rounds n up to whole pages.
func Padded(n int64) int64 { return (n + Page - 1) &^ (Page - 1) }

// DataOffset returns the offset of the payload in a file with the given number of extents.
func DataOffset(extents int, compressed bool) int64 {
	if compressed {
		return Page + Padded(storedBytes*int64(extents))
	}
	return Page + Padded(8*int64(extents))
}

// FileBytes returns the size of a piece file of version 1 under a plan.
func FileBytes(plan *kv.Plan) int64 {
	return DataOffset(len(plan.Extents()), false) + Padded(plan.PayloadBytes())
}

// MostBytes returns the largest size of a piece file under a plan, in any version. An entry reserves this size for a piece,
// because it is not known in advance whether this or a later run of the host will write the piece compressed.
func MostBytes(plan *kv.Plan) int64 {
	return DataOffset(len(plan.Extents()), true) + Padded(plan.PayloadBytes())
}

// MostBytes returns the largest size of a file with the piece's plan, in any version.
func (h *Header) MostBytes() int64 { return DataOffset(int(h.Extents), true) + Padded(h.Payload) }

// Version returns the format version of the piece.
func (h *Header) Version() uint32 {
	if h.Stored > 0 {
		return CompressedVersion
	}
	return FormatVersion
}

// FileBytes returns the size of the whole file.
func (h *Header) FileBytes() int64 { return h.DataOffset + Padded(cmp.Or(h.Stored, h.Payload)) }

// Encode writes the header to the first page of dst.
func (h *Header) Encode(dst []byte) {
	page := dst[:Page]
	clear(page)
	le := binary.LittleEndian
	copy(page[offMagic:], headerMagic)
	le.PutUint32(page[offVersion:], h.Version())
	le.PutUint32(page[offAlgorithm:], uint32(h.Algorithm))
	copy(page[offNamespace:], h.Namespace[:])
	copy(page[offKey:], h.Key[:])
	copy(page[offParent:], h.Parent[:])
	le.PutUint32(page[offDepth:], h.Depth)
	le.PutUint32(page[offGroup:], h.Group)
	le.PutUint32(page[offRank:], h.Rank)
	le.PutUint32(page[offBlocks:], h.Blocks)
	le.PutUint32(page[offTenant:], h.Tenant)
	le.PutUint32(page[offExtent:], h.Extent)
	le.PutUint64(page[offPieces:], h.Pieces)
	le.PutUint64(page[offStoreTime:], uint64(h.StoreTime))
	le.PutUint64(page[offPayload:], uint64(h.Payload))
	copy(page[offPlan:], h.Plan[:])
	le.PutUint32(page[offExtents:], h.Extents)
	le.PutUint64(page[offDataOffset:], uint64(h.DataOffset))
	le.PutUint64(page[offTableSum:], h.TableSum)
	le.PutUint64(page[offStored:], uint64(h.Stored))
	if h.Name != "" {
		le.PutUint64(page[offFlags:], flagNamed)
		le.PutUint32(page[offNameLen:], uint32(len(h.Name)))
		copy(page[offName:], h.Name)
	}
	le.PutUint64(page[offSum:], xxh3.Hash(page))
}

// DecodeHeader decodes the first page of a piece file. A header that is returned without an error is complete and consistent in
// itself. The caller must check that it belongs to the expected piece, and that the file has the size in the header.
func DecodeHeader(b []byte) (Header, error) {
	var h Header
	if len(b) < Page {
		return h, fmt.Errorf("%w: %d bytes, a header is %d", ErrDamaged, len(b), Page)
	}
	page, le := b[:Page], binary.LittleEndian
	if string(page[offMagic:offMagic+len(headerMagic)]) != headerMagic {
		return h, ErrNotPiece
	}
	version, unused := le.Uint32(page[offVersion:]), page[offEnd:]
	switch version {
	case FormatVersion:
	case CompressedVersion:
		unused = page[offName:]
	default:
		return h, fmt.Errorf("%w: version %d, this host reads %d and %d", ErrUnknownFormat, version, FormatVersion,
			CompressedVersion)
	}
	if got, want := headerSum(page), le.Uint64(page[offSum:]); got != want {
		return h, fmt.Errorf("%w: header checksum %016x, the header says %016x", ErrDamaged, got, want)
	}
	switch f, n := le.Uint64(page[offFlags:]), le.Uint32(page[offNameLen:]); {
	case f&^flagNamed != 0:
		return h, fmt.Errorf("%w: flags %#x", ErrUnknownFormat, f)
	case n > MaxPath || f == flagNamed && n == 0 || f == 0 && n != 0:
		return h, fmt.Errorf("%w: header says a name of %d bytes with flags %#x", ErrDamaged, n, f)
	case f == flagNamed:
		h.Name = string(page[offName : offName+n])
		unused = page[offName+n:]
		if version == FormatVersion && le.Uint64(page[offStored:]) != 0 {
			return h, fmt.Errorf("%w: stored bytes in version %d", ErrUnknownFormat, version)
		}
	}
	if a := le.Uint32(page[offAlgorithm:]); a != uint32(kv.XXH3) {
		return h, fmt.Errorf("%w: checksum algorithm %d", ErrUnknownFormat, a)
	}
	for _, c := range unused {
		if c != 0 {
			return h, fmt.Errorf("%w: fields beyond those of version %d", ErrUnknownFormat, version)
		}
	}
	copy(h.Namespace[:], page[offNamespace:])
	copy(h.Key[:], page[offKey:])
	copy(h.Parent[:], page[offParent:])
	h.Depth = le.Uint32(page[offDepth:])
	h.Group = le.Uint32(page[offGroup:])
	h.Rank = le.Uint32(page[offRank:])
	h.Blocks = le.Uint32(page[offBlocks:])
	h.Tenant = le.Uint32(page[offTenant:])
	h.Algorithm = kv.XXH3
	h.Extent = le.Uint32(page[offExtent:])
	h.Pieces = le.Uint64(page[offPieces:])
	h.StoreTime = int64(le.Uint64(page[offStoreTime:]))
	h.Payload = int64(le.Uint64(page[offPayload:]))
	copy(h.Plan[:], page[offPlan:])
	h.Extents = le.Uint32(page[offExtents:])
	h.DataOffset = int64(le.Uint64(page[offDataOffset:]))
	h.TableSum = le.Uint64(page[offTableSum:])
	if version == CompressedVersion {
		h.Stored = int64(le.Uint64(page[offStored:]))
	}
	return h, h.validate(version)
}

// headerSum returns the checksum of a page, with the checksum field taken as zero.
func headerSum(page []byte) uint64 {
	var b [Page]byte
	copy(b[:], page)
	clear(b[offSum : offSum+8])
	return xxh3.Hash(b[:])
}

// maxExtents is the maximum number of extents of a payload.
const maxExtents = kv.MaxPayload/kv.ExtentBytes + kv.MaxSegments

func (h *Header) validate(version uint32) error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: header says "+format, append([]any{ErrDamaged}, args...)...)
	}
	switch {
	case h.Key == kv.Root:
		return bad("an all-zero key")
	case h.Key == h.Parent:
		return bad("that %s is its own parent", h.Key)
	case h.Rank >= kv.MaxRanks:
		return bad("rank %d", h.Rank)
	case h.Pieces&(1<<h.Rank) == 0:
		return bad("that rank %d is not among the entry's pieces %#x", h.Rank, h.Pieces)
	case h.Blocks == 0 || h.Blocks > kv.MaxBlocks:
		return bad("%d blocks", h.Blocks)
	case h.Payload <= 0 || h.Payload > kv.MaxPayload+kv.MaxSegments*Page:
		return bad("%d payload bytes", h.Payload)
	case h.Extent == 0 || h.Extent > kv.ExtentBytes:
		return bad("extents of %d bytes", h.Extent)
	case h.Extents == 0 || h.Extents > maxExtents:
		return bad("%d extents", h.Extents)
	case version == CompressedVersion && (h.Stored <= 0 || h.Stored > h.Payload):
		return bad("%d stored bytes of %d", h.Stored, h.Payload)
	case h.Name != "" && CheckName(h.Name) != nil:
		return bad("the name %q, which no piece can have", h.Name)
	case h.DataOffset != DataOffset(int(h.Extents), version == CompressedVersion):
		return bad("a payload at %d after %d extents", h.DataOffset, h.Extents)
	}
	return nil
}

// Fits returns an error if the header does not match the plan that it names.
func (h *Header) Fits(plan *kv.Plan) error {
	if g := plan.Geometry(); h.Payload != plan.PayloadBytes() || int(h.Extents) != len(plan.Extents()) || h.Blocks != g.Blocks ||
		h.Extent != kv.ExtentBytes {
		return fmt.Errorf("%w: %d payload bytes, %d extents and %d blocks under a plan of %d, %d and %d",
			ErrDamaged, h.Payload, h.Extents, h.Blocks, plan.PayloadBytes(), len(plan.Extents()), g.Blocks)
	}
	return nil
}

// IsOf reports whether the header belongs to this piece.
func (h *Header) IsOf(namespace kv.Digest, group uint32, key *kv.Key, rank uint32) bool {
	return h.Key == *key && h.Namespace == namespace && h.Group == group && h.Rank == rank
}

// Errors about the contents of files.
var (
	// ErrUnknownFormat means that a piece has a format version, flag or algorithm that this host does not know.
	ErrUnknownFormat = errors.New("unknown piece format")
	// ErrNotPiece means that a file does not start like a piece.
	ErrNotPiece = errors.New("not a piece file")
	// ErrDamaged means that the contents of a file are inconsistent.
	ErrDamaged = errors.New("damaged file")
	// ErrWrongPiece means that a valid piece has the name of another piece.
	ErrWrongPiece = errors.New("the file holds another piece")
	// ErrUnknownPlan means that a piece has a layout plan that its root does not hold.
	ErrUnknownPlan = errors.New("unknown layout plan")
)

// IsDamage reports whether an error is about the content of a file, and not about reading it.
func IsDamage(err error) bool {
	return errors.Is(err, ErrUnknownFormat) || errors.Is(err, ErrNotPiece) || errors.Is(err, ErrDamaged)
}
