package store

import (
	"encoding/binary"
	"fmt"
	"io"

	"github.com/kvhost/kvhost/host/chunk"
	"github.com/zeebo/xxh3"
)

// The file of a checkpoint, little-endian: a head of 64 bytes; the owners, 64 bytes each; the entries by slot.
const (
	checkpointMagic = "kvindex1"
	checkpointHead  = 64
	ownerRecord     = 64
	entryRecord     = 28 // and 16 or 32 of key, and what flags say
	checkpointPart  = 1 << 20
)

// Flags of an entry's record, beside its state bits.
const (
	recLong = 1 << iota // a key of 32 bytes
	recWide             // a set of ranks of 8 bytes, not of one
	recOwed             // 8 bytes: ranks that bytes are reserved for and that are not there
	recEnds             // 4 bytes: when it expires
)

// checkpoint is the head.
type checkpoint struct {
	when    int64 // a store time: later ones are greater
	high    uint32
	clock   uint32
	entries uint32
	owners  uint32
	body    uint64 // xxh3-64 of what follows
}

func (c *checkpoint) encode() []byte {
	le, b := binary.LittleEndian, make([]byte, 0, checkpointHead)
	b = append(b, checkpointMagic...)
	b = le.AppendUint64(b, uint64(c.when))
	b = le.AppendUint32(b, c.high)
	b = le.AppendUint32(b, c.clock)
	b = le.AppendUint32(b, c.entries)
	b = le.AppendUint32(b, c.owners)
	b = append(b, make([]byte, 16)...)
	b = le.AppendUint64(b, c.body)
	return le.AppendUint64(b, xxh3.Hash(b))
}

func decodeCheckpoint(b []byte) (c checkpoint, err error) {
	le := binary.LittleEndian
	if len(b) < checkpointHead || string(b[:8]) != checkpointMagic || le.Uint64(b[56:]) != xxh3.Hash(b[:56]) {
		return c, fmt.Errorf("%w: not a checkpoint of this version", ErrDamaged)
	}
	return checkpoint{
		when: int64(le.Uint64(b[8:])), high: le.Uint32(b[16:]), clock: le.Uint32(b[20:]), entries: le.Uint32(b[24:]),
		owners: le.Uint32(b[28:]), body: le.Uint64(b[48:]),
	}, nil
}

// appendEntry appends an entry's record.
func (x *index) appendEntry(b []byte, slot uint32, ends *expiries) []byte {
	le, e, k := binary.LittleEndian, x.at(slot), x.key(slot)
	set, owed, flags := x.pieces(slot), x.owed[slot], byte(0)
	if [keyTail]byte(k[keyHead:]) != [keyTail]byte{} {
		flags |= recLong
	}
	if set > 0xff {
		flags |= recWide
	}
	if owed != 0 {
		flags |= recOwed
	}
	end := ends.at(slot)
	if end != 0 {
		flags |= recEnds
	}
	b = le.AppendUint32(b, slot)
	b = append(b, flags, e.what[0]&(stComplete|stDetour))
	b = append(b, e.what[1:]...)
	b = append(b, e.parent[:]...)
	b = append(b, e.tick[:]...)
	b = le.AppendUint32(b, x.units(slot))
	b = le.AppendUint16(b, e.deep)
	b = append(b, byte(set))
	b = append(b, k[:keyHead]...)
	if flags&recLong != 0 {
		b = append(b, k[keyHead:]...)
	}
	if flags&recWide != 0 {
		b = le.AppendUint64(b, set)
	}
	if flags&recOwed != 0 {
		b = le.AppendUint64(b, owed)
	}
	if end != 0 {
		b = le.AppendUint32(b, end)
	}
	return b
}

// enterRecord enters what appendEntry wrote, in its old slot, and returns how long the record is; 0 when b is only a part of
// it. Slots come in order. owners translates the numbers of that time.
func (x *index) enterRecord(b []byte, owners []uint32, ends *expiries) (n int, err error) {
	if len(b) < entryRecord+keyHead {
		return 0, nil
	}
	le, flags := binary.LittleEndian, b[4]
	n = entryRecord + keyHead
	for i, size := range [...]int{keyTail, 8, 8, 4} {
		if flags>>i&1 != 0 {
			n += size
		}
	}
	if len(b) < n {
		return 0, nil
	}
	slot := le.Uint32(b)
	who := uint32(b[6]) | uint32(b[7])<<8 | uint32(b[8])<<16
	if slot >= x.max || slot < x.high || flags > recLong|recWide|recOwed|recEnds || int(who) >= len(owners) || owners[who] == none {
		return n, fmt.Errorf("%w: slot %d of owner %d after slot %d", ErrDamaged, slot, who, x.high)
	}
	var k chunk.Key
	rest := b[entryRecord+copy(k[:], b[entryRecord:entryRecord+keyHead]):]
	if flags&recLong != 0 {
		rest = rest[copy(k[keyHead:], rest[:keyTail]):]
	}
	set := uint64(b[27])
	if flags&recWide != 0 {
		set, rest = le.Uint64(rest), rest[8:]
	}
	o := x.owners.list[owners[who]]
	if k == chunk.Root {
		return n, fmt.Errorf("%w: slot %d without a key", ErrDamaged, slot)
	}
	x.takeAt(slot, &k)
	e := x.at(slot)
	e.setOwner(owners[who])
	e.set(stLive | b[5]&(stComplete|stDetour))
	copy(e.parent[:], b[9:])
	copy(e.tick[:], b[17:])
	e.deep = le.Uint16(b[25:])
	if !x.insert(x.hash(o.class, k), slot) {
		return n, fmt.Errorf("%w: more keys nearly equal than the index takes", ErrDamaged)
	}
	x.join(slot)
	x.setUnits(slot, le.Uint32(b[21:]))
	x.setPieces(slot, set)
	if flags&recOwed != 0 {
		x.owe(slot, le.Uint64(rest))
		rest = rest[8:]
	}
	if flags&recEnds != 0 {
		ends.set(slot, int64(le.Uint32(rest)))
	}
	return n, nil
}

func (x *index) writeCheckpoint(w io.WriterAt, c checkpoint, owners []byte, ends *expiries) error {
	sum, at, part := xxh3.New(), int64(checkpointHead), owners
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
	for slot := range x.high {
		if x.at(slot).is(stLive) {
			part = x.appendEntry(part, slot, ends)
		}
		if err := flush(checkpointPart); err != nil {
			return err
		}
	}
	if err := flush(0); err != nil {
		return err
	}
	c.body = sum.Sum64()
	_, err := w.WriteAt(c.encode(), 0)
	return err
}

// readCheckpoint fills an empty index. After an error it is of no use.
func (x *index) readCheckpoint(f io.ReaderAt, size int64, ends *expiries, ownerFor func([]byte) (owner, error)) (checkpoint, error) {
	head := make([]byte, min(size, checkpointHead))
	if _, err := f.ReadAt(head, 0); err != nil && err != io.EOF {
		return checkpoint{}, err
	}
	c, err := decodeCheckpoint(head)
	switch {
	case err != nil:
		return c, err
	case c.high > x.max:
		return c, fmt.Errorf("%w: %d slots, the root has %d now", ErrDamaged, c.high, x.max)
	case size < checkpointHead+int64(c.owners)*ownerRecord+int64(c.entries)*(entryRecord+keyHead) || c.owners > maxOwners || c.entries > c.high:
		return c, fmt.Errorf("%w: a checkpoint of %d entries in %d bytes", ErrDamaged, c.entries, size)
	}
	x.reserve(int(c.entries))
	x.kin.reserve(int(c.entries))
	sum, buf, at := xxh3.New(), make([]byte, 0, checkpointPart+entryRecord+64), int64(checkpointHead)
	owners := make([]uint32, 0, c.owners)
	for at < size || len(buf) > 0 {
		n := min(size-at, int64(checkpointPart))
		fresh := buf[len(buf) : len(buf)+int(n)]
		if _, err := f.ReadAt(fresh, at); err != nil && err != io.EOF {
			return c, err
		}
		_, _ = sum.Write(fresh)
		at += n
		left := buf[:len(buf)+int(n)]
		for len(owners) < cap(owners) && len(left) >= ownerRecord {
			id := none
			if rec := left[:ownerRecord]; [ownerRecord]byte(rec) != [ownerRecord]byte{} {
				o, err := ownerFor(rec)
				if err != nil {
					return c, err
				}
				id, _ = x.owners.intern(o)
			}
			owners, left = append(owners, id), left[ownerRecord:]
		}
		for len(owners) == int(c.owners) && len(left) > 0 {
			n, err := x.enterRecord(left, owners, ends)
			if err != nil {
				return c, err
			}
			if n == 0 {
				break
			}
			left = left[n:]
		}
		if n == 0 && len(left) > 0 {
			return c, fmt.Errorf("%w: the checkpoint ends within an entry", ErrDamaged)
		}
		buf = append(buf[:0], left...)
	}
	if sum.Sum64() != c.body || x.used != c.entries || x.high > c.high {
		return c, fmt.Errorf("%w: the checkpoint has %d entries and checksum %016x, it says %d and %016x", ErrDamaged, x.used, sum.Sum64(), c.entries, c.body)
	}
	x.clock = c.clock
	x.fillGaps(c.high)
	return c, nil
}
