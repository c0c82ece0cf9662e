package index

import "github.com/kvhost/kvhost/host/kv"

// slab holds entries by slot, in blocks that are allocated on first use. Slots are dense: a freed slot is reused before a new
// one is taken. A block is enlarged for long keys when one of its slots gets the first. Its entries move then, so pointers to
// entries are not valid after alloc.
type slab struct {
	blocks []block
	free   uint32 // first slot of the free list, or None
	high   uint32 // number of slots ever used
	used   uint32
	max    uint32
}

// block holds either short or long entries.
type block struct {
	short *[blockSlots]Entry
	long  *[blockSlots]longEntry
}

const blockSlots = 4096

// At returns the entry in a slot. The pointer is valid until the next entry is added.
func (s *slab) At(slot uint32) *Entry {
	b := &s.blocks[slot/blockSlots]
	if b.long != nil {
		return &b.long[slot%blockSlots].Entry
	}
	return &b.short[slot%blockSlots]
}

// Key returns the key of the entry in a slot.
func (s *slab) Key(slot uint32) (k kv.Key) {
	b := &s.blocks[slot/blockSlots]
	if b.long != nil {
		e := &b.long[slot%blockSlots]
		copy(k[:], e.head[:])
		copy(k[keyHead:], e.tail[:])
		return k
	}
	copy(k[:], b.short[slot%blockSlots].head[:])
	return k
}

// Match returns the slot's entry if it has this key, and nil otherwise.
func (s *slab) Match(slot uint32, k *kv.Key) *Entry {
	if slot >= s.high {
		return nil
	}
	b := &s.blocks[slot/blockSlots]
	if b.long != nil {
		if e := &b.long[slot%blockSlots]; e.head == [keyHead]byte(k[:keyHead]) && e.tail == [keyTail]byte(k[keyHead:]) {
			return &e.Entry
		}
		return nil
	}
	if e := &b.short[slot%blockSlots]; e.head == [keyHead]byte(k[:keyHead]) &&
		[keyTail]byte(k[keyHead:]) == [keyTail]byte{} {
		return e
	}
	return nil
}

// Len returns the number of entries.
func (s *slab) Len() uint32 { return s.used }

// High returns the highest slot ever used plus one.
func (s *slab) High() uint32 { return s.high }

// Max returns the maximum number of entries that the slab may have.
func (s *slab) Max() uint32 { return s.max }

// alloc returns the slot of a new entry with this key, or None if all slots are in use.
func (s *slab) alloc(k *kv.Key) uint32 {
	slot := s.free
	switch {
	case slot != None:
		s.free = s.At(slot).LastTouch()
	case s.high == s.max:
		return None
	default:
		slot = s.high
		s.high++
		if slot%blockSlots == 0 {
			s.blocks = append(s.blocks, block{})
		}
	}
	s.used++
	s.setKey(slot, k)
	return slot
}

func (s *slab) setKey(slot uint32, k *kv.Key) {
	b, i := &s.blocks[slot/blockSlots], slot%blockSlots
	tail := [keyTail]byte(k[keyHead:])
	if b.long == nil && tail != [keyTail]byte{} {
		b.long = new([blockSlots]longEntry)
		if b.short != nil {
			for i := range b.short {
				b.long[i].Entry = b.short[i]
			}
			b.short = nil
		}
	}
	e := Entry{head: [keyHead]byte(k[:keyHead])}
	if b.long != nil {
		b.long[i] = longEntry{e, tail}
		return
	}
	if b.short == nil {
		b.short = new([blockSlots]Entry)
	}
	b.short[i] = e
}

func (s *slab) dealloc(slot uint32) {
	e := s.At(slot)
	*e = Entry{}
	e.SetLastTouch(s.free)
	s.free = slot
	s.used--
}

// allocAt uses a slot above all others, for an entry from a checkpoint. freeGaps later frees the slots in between.
func (s *slab) allocAt(slot uint32, k *kv.Key) {
	for uint32(len(s.blocks)) <= slot/blockSlots {
		s.blocks = append(s.blocks, block{})
	}
	s.high = slot + 1
	s.used++
	s.setKey(slot, k)
}

func (s *slab) freeGaps(high uint32) {
	for i := range s.blocks {
		if b := &s.blocks[i]; b.short == nil && b.long == nil {
			b.short = new([blockSlots]Entry)
		}
	}
	for uint32(len(s.blocks)) < (high+blockSlots-1)/blockSlots {
		s.blocks = append(s.blocks, block{short: new([blockSlots]Entry)})
	}
	s.high = high
	for slot := high; slot > 0; {
		slot--
		if e := s.At(slot); !e.Is(Live) {
			e.SetLastTouch(s.free)
			s.free = slot
		}
	}
}

// memory returns the size of the blocks in bytes.
func (s *slab) memory() (n int64) {
	const shortSize, longSize = 38, 38 + keyTail
	for i := range s.blocks {
		if s.blocks[i].long != nil {
			n += blockSlots * longSize
		} else {
			n += blockSlots * shortSize
		}
	}
	return n + int64(cap(s.blocks))*16
}
