package pieceformat

import (
	"encoding/binary"
	"fmt"
	"io"
	"iter"
	"time"

	"github.com/kvhost/kvhost/host/kv"
	"github.com/zeebo/xxh3"
)

// Layout of a checkpoint file, little-endian: a head of 64 bytes; the owners, 32 bytes each; the entries by slot.
const (
	checkpointMagic = "kvindex2"
	checkpointHead  = 64
	ownerRecord     = 32
	entryRecord     = 28 // followed by 16 or 32 bytes of key, the fields that flags announce, and names
	checkpointPart  = 1 << 20
	maxNames        = 1 << 17 // bytes: enough for the names of 64 ranks
	keyHead         = 16
	keyTail         = kv.KeyBytes - keyHead
)

// State bits of an entry.
const (
	StateComplete = 1 << 3 // all pieces that a put or a header named are present
	StateNamed    = 1 << 4 // a piece has a name other than the built-in one; the names follow
)

// Flags of an entry's record.
const (
	recordLongKey = 1 << iota // the key has 32 bytes
	recordWide                // 8 bytes: the set of pieces if it does not fit one byte
	recordMissing             // 8 bytes: ranks of missing pieces with reserved bytes
	recordExpires             // 4 bytes: expiry time
	recordFlags   = 1<<iota - 1
)

// Checkpoint is the head of a checkpoint file.
type Checkpoint struct {
	Time    int64  // store time at which the checkpoint was written; later checkpoints have a greater one
	High    uint32 // highest slot ever used plus one
	Clock   uint32 // last tick of the index
	Entries uint32
	Owners  uint32
	body    uint64 // xxh3-64 of the bytes after the head
}

// CheckpointOwner is the owner of many entries. The owner is zero if no entry has it any more.
type CheckpointOwner struct {
	Namespace kv.Digest
	Group     uint32
	Tenant    uint32
	TTL       time.Duration
}

// CheckpointEntry is the record of one entry of an index.
type CheckpointEntry struct {
	Slot      uint32
	OwnerID   uint32 // position among the owners of the checkpoint
	State     uint8  // StateComplete and StateNamed
	Parent    uint64 // fingerprint of the parent
	LastTouch uint32
	Units     uint32
	Depth     uint16
	Pieces    uint64
	Missing   uint64
	Expires   uint32 // seconds since 1970; 0 means never
	Key       kv.Key
	Names     []Name // set if State has StateNamed
}

func (c *Checkpoint) encode() []byte {
	le, b := binary.LittleEndian, make([]byte, 0, checkpointHead)
	b = append(b, checkpointMagic...)
	b = le.AppendUint64(b, uint64(c.Time))
	b = le.AppendUint32(b, c.High)
	b = le.AppendUint32(b, c.Clock)
	b = le.AppendUint32(b, c.Entries)
	b = le.AppendUint32(b, c.Owners)
	b = append(b, make([]byte, 16)...)
	b = le.AppendUint64(b, c.body)
	return le.AppendUint64(b, xxh3.Hash(b))
}

func decodeCheckpoint(b []byte) (c Checkpoint, err error) {
	le := binary.LittleEndian
	if len(b) < checkpointHead || string(b[:8]) != checkpointMagic || le.Uint64(b[56:]) != xxh3.Hash(b[:56]) {
		return c, fmt.Errorf("%w: not a checkpoint of this version", ErrDamaged)
	}
	return Checkpoint{
		Time: int64(le.Uint64(b[8:])), High: le.Uint32(b[16:]), Clock: le.Uint32(b[20:]), Entries: le.Uint32(b[24:]),
		Owners: le.Uint32(b[28:]), body: le.Uint64(b[48:]),
	}, nil
}

func (o *CheckpointOwner) append(b []byte) []byte {
	le := binary.LittleEndian
	b = append(b, o.Namespace[:]...)
	b = le.AppendUint32(b, o.Group)
	b = le.AppendUint32(b, o.Tenant)
	return le.AppendUint64(b, uint64(o.TTL))
}

func decodeOwner(b []byte) (o CheckpointOwner) {
	le := binary.LittleEndian
	copy(o.Namespace[:], b)
	o.Group, o.Tenant, o.TTL = le.Uint32(b[16:]), le.Uint32(b[20:]), time.Duration(le.Uint64(b[24:]))
	return o
}

func (e *CheckpointEntry) append(b []byte) []byte {
	le, flags := binary.LittleEndian, byte(0)
	if [keyTail]byte(e.Key[keyHead:]) != [keyTail]byte{} {
		flags |= recordLongKey
	}
	if e.Pieces > 0xff {
		flags |= recordWide
	}
	if e.Missing != 0 {
		flags |= recordMissing
	}
	if e.Expires != 0 {
		flags |= recordExpires
	}
	b = le.AppendUint32(b, e.Slot)
	b = append(b, flags)
	b = le.AppendUint32(b, e.OwnerID<<8|uint32(e.State))
	b = le.AppendUint64(b, e.Parent)
	b = le.AppendUint32(b, e.LastTouch)
	b = le.AppendUint32(b, e.Units)
	b = le.AppendUint16(b, e.Depth)
	b = append(b, byte(e.Pieces))
	b = append(b, e.Key[:keyHead]...)
	if flags&recordLongKey != 0 {
		b = append(b, e.Key[keyHead:]...)
	}
	if flags&recordWide != 0 {
		b = le.AppendUint64(b, e.Pieces)
	}
	if flags&recordMissing != 0 {
		b = le.AppendUint64(b, e.Missing)
	}
	if flags&recordExpires != 0 {
		b = le.AppendUint32(b, e.Expires)
	}
	if e.State&StateNamed != 0 {
		b = le.AppendUint32(b, uint32(NamesBytes(e.Names)))
		b = AppendNames(b, e.Names)
	}
	return b
}

// decode decodes a record and returns its length. The length is 0 if b holds only a part of the record.
func (e *CheckpointEntry) decode(b []byte) (n int, err error) {
	n = entryRecord + keyHead
	if len(b) < n {
		return 0, nil
	}
	le, flags := binary.LittleEndian, b[4]
	if flags > recordFlags {
		return 0, fmt.Errorf("%w: checkpoint record with flags %#x", ErrDamaged, flags)
	}
	for i, size := range [...]int{keyTail, 8, 8, 4} {
		if flags>>i&1 != 0 {
			n += size
		}
	}
	word := le.Uint32(b[5:])
	if uint8(word)&StateNamed != 0 && len(b) < n+4 || len(b) < n {
		return 0, nil
	}
	*e = CheckpointEntry{
		Slot: le.Uint32(b), OwnerID: word >> 8, State: uint8(word), Parent: le.Uint64(b[9:]), LastTouch: le.Uint32(b[17:]),
		Units: le.Uint32(b[21:]), Depth: le.Uint16(b[25:]), Pieces: uint64(b[27]),
	}
	rest := b[entryRecord+copy(e.Key[:], b[entryRecord:entryRecord+keyHead]):]
	if flags&recordLongKey != 0 {
		rest = rest[copy(e.Key[keyHead:], rest[:keyTail]):]
	}
	if flags&recordWide != 0 {
		e.Pieces, rest = le.Uint64(rest), rest[8:]
	}
	if flags&recordMissing != 0 {
		e.Missing, rest = le.Uint64(rest), rest[8:]
	}
	if flags&recordExpires != 0 {
		e.Expires, rest = le.Uint32(rest), rest[4:]
	}
	if e.State&StateNamed == 0 {
		return n, nil
	}
	size := int64(le.Uint32(rest))
	if size > maxNames {
		return 0, fmt.Errorf("%w: names of %d bytes in a checkpoint record", ErrDamaged, size)
	}
	if int64(len(rest)) < 4+size {
		return 0, nil
	}
	if e.Names, err = DecodeNames(rest[4 : 4+size]); err != nil {
		return 0, fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	return n + 4 + int(size), nil
}

// WriteCheckpoint writes a checkpoint. It sets the number of owners in c itself.
func WriteCheckpoint(w io.WriterAt, c Checkpoint, owners []CheckpointOwner, entries iter.Seq[*CheckpointEntry]) error {
	sum, at, part := xxh3.New(), int64(checkpointHead), []byte(nil)
	flush := func(most int) error {
		if len(part) <= most {
			return nil
		}
		_, _ = sum.Write(part)
		_, err := w.WriteAt(part, at)
		at += int64(len(part))
		part = part[:0]
		return err
	}
	for i := range owners {
		part = owners[i].append(part)
	}
	for e := range entries {
		part = e.append(part)
		if err := flush(checkpointPart); err != nil {
			return err
		}
	}
	if err := flush(0); err != nil {
		return err
	}
	c.Owners, c.body = uint32(len(owners)), sum.Sum64()
	_, err := w.WriteAt(c.encode(), 0)
	return err
}

// CheckpointVisitor receives a checkpoint while it is read: the head, the owners by number, and the entries by slot. An error
// ends the reading.
type CheckpointVisitor interface {
	Head(c Checkpoint) error
	Owner(o *CheckpointOwner) error
	Entry(e *CheckpointEntry) error
}

// ReadCheckpoint reads a checkpoint. The visitor must not rely on the contents until ReadCheckpoint has returned without an
// error, because the checksum is verified at the end.
func ReadCheckpoint(f io.ReaderAt, size int64, v CheckpointVisitor) (Checkpoint, error) {
	head := make([]byte, min(size, checkpointHead))
	if _, err := f.ReadAt(head, 0); err != nil && err != io.EOF {
		return Checkpoint{}, err
	}
	c, err := decodeCheckpoint(head)
	switch {
	case err != nil:
		return c, err
	case size < checkpointHead+int64(c.Owners)*ownerRecord+int64(c.Entries)*(entryRecord+keyHead) || c.Entries > c.High:
		return c, fmt.Errorf("%w: a checkpoint of %d entries in %d bytes", ErrDamaged, c.Entries, size)
	}
	if err := v.Head(c); err != nil {
		return c, err
	}
	r := checkpointReader{head: c, visitor: v}
	sum, buf, at := xxh3.New(), make([]byte, 0, checkpointPart+entryRecord+64+maxNames), int64(checkpointHead)
	for at < size || len(buf) > 0 {
		n := min(size-at, int64(checkpointPart))
		fresh := buf[len(buf) : len(buf)+int(n)]
		if _, err := f.ReadAt(fresh, at); err != nil && err != io.EOF {
			return c, err
		}
		_, _ = sum.Write(fresh)
		at += n
		left, err := r.read(buf[:len(buf)+int(n)])
		if err != nil {
			return c, err
		}
		if n == 0 && len(left) > 0 {
			return c, fmt.Errorf("%w: the checkpoint ends within a record", ErrDamaged)
		}
		buf = append(buf[:0], left...)
	}
	if got := sum.Sum64(); got != c.body || r.entries != c.Entries || r.high > c.High {
		return c, fmt.Errorf("%w: the checkpoint has %d entries and checksum %016x, its head says %d and %016x",
			ErrDamaged, r.entries, got, c.Entries, c.body)
	}
	return c, nil
}

// checkpointReader is the progress of reading a checkpoint.
type checkpointReader struct {
	head            Checkpoint
	visitor         CheckpointVisitor
	owners, entries uint32
	high            uint32
}

// read decodes the whole records in b and returns the rest.
func (r *checkpointReader) read(b []byte) ([]byte, error) {
	for r.owners < r.head.Owners && len(b) >= ownerRecord {
		o := decodeOwner(b)
		if err := r.visitor.Owner(&o); err != nil {
			return nil, err
		}
		r.owners, b = r.owners+1, b[ownerRecord:]
	}
	var e CheckpointEntry
	for r.owners == r.head.Owners && len(b) > 0 {
		n, err := e.decode(b)
		switch {
		case err != nil:
			return nil, err
		case n == 0:
			return b, nil
		case e.Slot < r.high || e.OwnerID >= r.head.Owners:
			return nil, fmt.Errorf("%w: slot %d of owner %d after slot %d", ErrDamaged, e.Slot, e.OwnerID, r.high)
		}
		if err := r.visitor.Entry(&e); err != nil {
			return nil, err
		}
		r.high, r.entries, b = e.Slot+1, r.entries+1, b[n:]
	}
	return b, nil
}
