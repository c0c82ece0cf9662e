package store

import (
	"encoding/binary"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/chunk"
)

// entry is what the index knows of a chunk: 38 bytes, and 16 more where keys are longer than that (see [slab]). The
// index compares whole keys and can name every file. Numbers are little-endian in bytes so that nothing is padded; what
// does not fit its field stands in a map of the index, because it is rare.
type entry struct {
	head   [keyHead]byte
	parent [8]byte // fingerprint of the parent; 0 for none
	tick   [4]byte // last touch, see index.touch; the next free slot when the slot is free
	what   [4]byte // owner<<8 | state bits
	size   uint16  // reserved, in abi.SizeUnit, all pieces: see index.units
	deep   uint16  // chunks from the prefix's root; maxDepth also for more
	pins   uint8   // leases, open pieces and writes: see index.pin
	ranks  uint8   // pieces present: see index.pieces
}

// longEntry is an entry with the second half of a key of more than 16 bytes.
type longEntry struct {
	entry
	tail [keyTail]byte
}

const (
	keyHead   = 16
	keyTail   = chunk.KeyBytes - keyHead
	maxDepth  = 1<<16 - 1
	slabChunk = 4096
	none      = abi.None
)

// State bits of an entry.
const (
	stLive      = 1 << iota // in use
	stLeaving               // REMOVE is sent; its files are being unlinked; lookups miss
	stDetached              // out of the table; waits for its last pin
	stComplete              // all pieces that some put or header named are there
	stDetour                // some piece stands under the built-in name
	stAnnounced             // the evict policy knows it
	stBits      = 0xff
)

func (e *entry) word() uint32        { return binary.LittleEndian.Uint32(e.what[:]) }
func (e *entry) is(bits uint8) bool  { return e.what[0]&bits == bits }
func (e *entry) any(bits uint8) bool { return e.what[0]&bits != 0 }
func (e *entry) set(bits uint8)      { e.what[0] |= bits }
func (e *entry) unset(bits uint8)    { e.what[0] &^= bits }
func (e *entry) owner() uint32       { return e.word() >> 8 }
func (e *entry) setOwner(id uint32) {
	binary.LittleEndian.PutUint32(e.what[:], id<<8|e.word()&stBits)
}
func (e *entry) parentPrint() uint64    { return binary.LittleEndian.Uint64(e.parent[:]) }
func (e *entry) setParent(print uint64) { binary.LittleEndian.PutUint64(e.parent[:], print) }
func (e *entry) touched() uint32        { return binary.LittleEndian.Uint32(e.tick[:]) }
func (e *entry) setTouched(tick uint32) { binary.LittleEndian.PutUint32(e.tick[:], tick) }
func (e *entry) depth() uint32          { return uint32(e.deep) }

// slab holds entries by slot, in chunks that are made as slots are first used. Slots are dense: a freed one is used
// again before a new one. A chunk has room for long keys once one of its slots has had one; an entry moves then, so
// pointers to entries are not kept over take.
type slab struct {
	chunks []slabPart
	free   uint32 // head of the free list
	high   uint32 // slots ever used
	used   uint32
	max    uint32
}

// slabPart is one of the two.
type slabPart struct {
	short *[slabChunk]entry
	long  *[slabChunk]longEntry
}

func (s *slab) at(slot uint32) *entry {
	p := &s.chunks[slot/slabChunk]
	if p.long != nil {
		return &p.long[slot%slabChunk].entry
	}
	return &p.short[slot%slabChunk]
}

// take gives a zeroed entry with this key, or none when all slots are in use.
func (s *slab) take(k *chunk.Key) uint32 {
	slot := s.free
	switch {
	case slot != none:
		s.free = s.at(slot).touched()
	case s.high == s.max:
		return none
	default:
		slot = s.high
		s.high++
		if slot%slabChunk == 0 {
			s.chunks = append(s.chunks, slabPart{})
		}
	}
	s.used++
	s.setKey(slot, k)
	return slot
}

func (s *slab) setKey(slot uint32, k *chunk.Key) {
	p, i := &s.chunks[slot/slabChunk], slot%slabChunk
	tail := [keyTail]byte(k[keyHead:])
	if p.long == nil && tail != [keyTail]byte{} {
		p.long = new([slabChunk]longEntry)
		if p.short != nil {
			for i := range p.short {
				p.long[i].entry = p.short[i]
			}
			p.short = nil
		}
	}
	e := entry{head: [keyHead]byte(k[:keyHead])}
	if p.long != nil {
		p.long[i] = longEntry{e, tail}
		return
	}
	if p.short == nil {
		p.short = new([slabChunk]entry)
	}
	p.short[i] = e
}

func (s *slab) give(slot uint32) {
	e := s.at(slot)
	*e = entry{}
	e.setTouched(s.free)
	s.free = slot
	s.used--
}

func (s *slab) key(slot uint32) (k chunk.Key) {
	p := &s.chunks[slot/slabChunk]
	if p.long != nil {
		e := &p.long[slot%slabChunk]
		copy(k[:], e.head[:])
		copy(k[keyHead:], e.tail[:])
		return k
	}
	copy(k[:], p.short[slot%slabChunk].head[:])
	return k
}

// match gives the slot's entry if it has this key, else nil.
func (s *slab) match(slot uint32, k *chunk.Key) *entry {
	if slot >= s.high {
		return nil
	}
	p := &s.chunks[slot/slabChunk]
	if p.long != nil {
		if e := &p.long[slot%slabChunk]; e.head == [keyHead]byte(k[:keyHead]) && e.tail == [keyTail]byte(k[keyHead:]) {
			return &e.entry
		}
		return nil
	}
	if e := &p.short[slot%slabChunk]; e.head == [keyHead]byte(k[:keyHead]) && [keyTail]byte(k[keyHead:]) == [keyTail]byte{} {
		return e
	}
	return nil
}

// memory is what the chunks take.
func (s *slab) memory() (n int64) {
	const shortSize, longSize = 38, 38 + keyTail
	for i := range s.chunks {
		if s.chunks[i].long != nil {
			n += slabChunk * longSize
		} else {
			n += slabChunk * shortSize
		}
	}
	return n + int64(cap(s.chunks))*16
}

// takeAt takes a slot beyond all that were used, for an entry that had it before; fillGaps frees those in between.
func (s *slab) takeAt(slot uint32, k *chunk.Key) {
	for uint32(len(s.chunks)) <= slot/slabChunk {
		s.chunks = append(s.chunks, slabPart{})
	}
	s.high = slot + 1
	s.used++
	s.setKey(slot, k)
}

func (s *slab) fillGaps(high uint32) {
	for i := range s.chunks {
		if p := &s.chunks[i]; p.short == nil && p.long == nil {
			p.short = new([slabChunk]entry)
		}
	}
	for uint32(len(s.chunks)) < (high+slabChunk-1)/slabChunk {
		s.chunks = append(s.chunks, slabPart{short: new([slabChunk]entry)})
	}
	s.high = high
	for slot := high; slot > 0; {
		slot--
		if e := s.at(slot); !e.is(stLive) {
			e.setTouched(s.free)
			s.free = slot
		}
	}
}
