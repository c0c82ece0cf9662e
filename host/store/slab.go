package store

import (
	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/chunk"
)

// entry is what the index knows of a chunk: 52 bytes. The first half of the key stands here and the second, where the
// engine's hashes are longer than that, in [slab].tails; so the index compares whole keys and can name every file.
type entry struct {
	head   [keyHead]byte
	parent [2]uint32 // fingerprint of the parent, low word first; 0 for none
	tick   uint32    // last touch, see index.touch
	next   uint32    // in the family; in the free list when the slot is free
	prev   uint32
	size   uint32 // reserved, in abi.SizeUnit, all pieces
	depth  uint32 // depth<<8 | state bits
	class  uint16
	tenant uint16
	pins   uint16 // leases, open pieces and writes
	mask   uint16 // pieces present, of ranks below 16
}

const (
	keyHead   = 16
	keyTail   = chunk.KeyBytes - keyHead
	maxPins   = 1<<16 - 1
	maxDepth  = 1<<24 - 1
	narrow    = 16 // ranks in entry.mask
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
	stWide                  // the mask stands in index.wide
	stAnnounced             // the evict policy knows it
	stUnproven              // found after an end that was not in order: every load verifies it
	stBits      = 0xff
)

func (e *entry) is(bits uint32) bool    { return e.depth&bits == bits }
func (e *entry) any(bits uint32) bool   { return e.depth&bits != 0 }
func (e *entry) set(bits uint32)        { e.depth |= bits }
func (e *entry) unset(bits uint32)      { e.depth &^= bits }
func (e *entry) parentPrint() uint64    { return uint64(e.parent[1])<<32 | uint64(e.parent[0]) }
func (e *entry) setParent(print uint64) { e.parent = [2]uint32{uint32(print), uint32(print >> 32)} }
func (e *entry) bytes() int64           { return int64(e.size) * abi.SizeUnit }

// slab holds entries by slot, in chunks that are made as slots are first used and never move. Slots are dense: a freed
// one is used again before a new one.
type slab struct {
	chunks []*[slabChunk]entry
	tails  []*[slabChunk][keyTail]byte // nil where no key of the chunk is longer than keyHead
	free   uint32                      // head of the free list
	high   uint32                      // slots ever used
	used   uint32
	max    uint32
	base   func(class uint16) uint16 // see class
}

func (s *slab) at(slot uint32) *entry { return &s.chunks[slot/slabChunk][slot%slabChunk] }

// take gives a zeroed entry, or none when all slots are in use.
func (s *slab) take() uint32 {
	if s.free != none {
		slot := s.free
		e := s.at(slot)
		s.free = e.next
		*e = entry{}
		s.used++
		return slot
	}
	if s.high == s.max {
		return none
	}
	if s.high%slabChunk == 0 {
		s.chunks = append(s.chunks, new([slabChunk]entry))
		s.tails = append(s.tails, nil)
	}
	s.high++
	s.used++
	return s.high - 1
}

func (s *slab) give(slot uint32) {
	*s.at(slot) = entry{next: s.free}
	s.free = slot
	s.used--
}

func (s *slab) setKey(slot uint32, k *chunk.Key) {
	copy(s.at(slot).head[:], k[:keyHead])
	tail := [keyTail]byte(k[keyHead:])
	t := s.tails[slot/slabChunk]
	if t == nil {
		if tail == [keyTail]byte{} {
			return
		}
		t = new([slabChunk][keyTail]byte)
		s.tails[slot/slabChunk] = t
	}
	t[slot%slabChunk] = tail
}

func (s *slab) key(slot uint32) (k chunk.Key) {
	copy(k[:], s.at(slot).head[:])
	if t := s.tails[slot/slabChunk]; t != nil {
		copy(k[keyHead:], t[slot%slabChunk][:])
	}
	return k
}

// holds says whether the slot is of this key and of a class with this base.
func (s *slab) holds(slot uint32, base uint16, k *chunk.Key) bool {
	e := s.at(slot)
	if e.head != [keyHead]byte(k[:keyHead]) || e.class != base && s.base(e.class) != base {
		return false
	}
	t := s.tails[slot/slabChunk]
	if t == nil {
		return [keyTail]byte(k[keyHead:]) == [keyTail]byte{}
	}
	return t[slot%slabChunk] == [keyTail]byte(k[keyHead:])
}
