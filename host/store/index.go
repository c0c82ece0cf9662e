package store

import (
	"github.com/kvhost/kvhost/host/chunk"
)

// index says what a root holds: entries by slot, slots by key, families by parent. It knows nothing of files, bytes or
// events, and is guarded by its root's mutex.
type index struct {
	slab
	shards [shardCount]shard
	wide   map[uint32]uint64 // pieces present, of entries with ranks of 16 and more
	owed   map[uint32]uint64 // pieces that bytes are reserved for and that are not there, of entries that have such
	clock  uint32            // the last tick given out
	print  func(class uint16, k chunk.Key) uint64
}

func newIndex(max uint32, print func(class uint16, k chunk.Key) uint64, base func(class uint16) uint16) *index {
	return &index{slab: slab{free: none, max: max, base: base}, wide: map[uint32]uint64{}, owed: map[uint32]uint64{}, print: print}
}

func (x *index) shard(print uint64) *shard { return &x.shards[print>>(64-shardBits)] }

func (x *index) slotPrint(slot uint32) uint64 {
	return x.print(x.at(slot).class, x.key(slot))
}

// find gives the slot of a key, or none. A leaving entry is found; a detached one is not. base is of the key's class.
func (x *index) find(print uint64, base uint16, k *chunk.Key) uint32 {
	t := x.shard(print)
	for i, word := t.start(print); i >= 0; i, word = t.again(i, word) {
		if slot := t.slot(i); x.holds(slot, base, k) {
			return slot
		}
	}
	return none
}

// warm reads the cell that find will read first, so that the misses of several keys overlap. The result means nothing.
func (x *index) warm(print uint64) uint16 {
	t := x.shard(print)
	if t.n == 0 {
		return 0
	}
	return t.cells[home(print, t.size())*cellWords]
}

// findPrint gives the slot of a fingerprint, or none.
func (x *index) findPrint(print uint64) uint32 {
	if print == 0 {
		return none
	}
	t := x.shard(print)
	for i, word := t.start(print); i >= 0; i, word = t.again(i, word) {
		if slot := t.slot(i); x.slotPrint(slot) == print {
			return slot
		}
	}
	return none
}

// add makes an entry for a key that is not there; none when the slots are out, or when more fingerprints than a table can
// hold apart are nearly equal (which takes somebody who wants them to be).
func (x *index) add(print uint64, class uint16, k *chunk.Key, parent uint64, depth uint32) uint32 {
	slot := x.take()
	if slot == none {
		return none
	}
	t := x.shard(print)
	for t.full() || !t.insert(print, slot) {
		if !t.grow(x.slotPrint) {
			x.give(slot)
			return none
		}
	}
	e := x.at(slot)
	e.class = class
	e.depth = min(depth, maxDepth)<<8 | stLive
	e.setParent(parent)
	x.setKey(slot, k)
	x.join(slot)
	return slot
}

// detach takes an entry out of the table and its family; the slot stays taken until release.
func (x *index) detach(slot uint32) {
	print := x.slotPrint(slot)
	t := x.shard(print)
	for i, word := t.start(print); i >= 0; i, word = t.again(i, word) {
		if t.slot(i) == slot {
			t.removeAt(i)
			break
		}
	}
	x.part(slot)
	x.at(slot).set(stDetached)
}

// release gives the slot of a detached entry back.
func (x *index) release(slot uint32) {
	delete(x.wide, slot)
	delete(x.owed, slot)
	x.give(slot)
}

// touch makes an entry the most recent. Ticks are a logical clock of 32 bits; when it runs out, all are halved, which
// may make old neighbours equal but never changes places.
func (x *index) touch(slot uint32) {
	if x.clock == 1<<32-1 {
		x.each(func(slot uint32, e *entry) { e.tick /= 2 })
		x.clock /= 2
	}
	x.clock++
	x.at(slot).tick = x.clock
}

// each calls visit for every slot in use.
func (x *index) each(visit func(slot uint32, e *entry)) {
	for slot := range x.high {
		if e := x.at(slot); e.is(stLive) {
			visit(slot, e)
		}
	}
}

// pieces is the set of ranks whose pieces are there.
func (x *index) pieces(slot uint32) uint64 {
	e := x.at(slot)
	if e.is(stWide) {
		return x.wide[slot]
	}
	return uint64(e.mask)
}

func (x *index) setPieces(slot uint32, mask uint64) {
	e := x.at(slot)
	if mask>>narrow != 0 {
		e.set(stWide)
	}
	if e.is(stWide) {
		x.wide[slot] = mask
		return
	}
	e.mask = uint16(mask)
}

// reserved is the set of ranks that an entry's size has bytes for.
func (x *index) reserved(slot uint32) uint64 { return x.pieces(slot) | x.owed[slot] }

// owe notes ranks that bytes were reserved for.
func (x *index) owe(slot uint32, ranks uint64) {
	if ranks != 0 {
		x.owed[slot] |= ranks
	}
}

// arrive enters a piece that bytes were reserved for.
func (x *index) arrive(slot, rank uint32) {
	x.setPieces(slot, x.pieces(slot)|1<<rank)
	if left := x.owed[slot] &^ (1 << rank); left != 0 {
		x.owed[slot] = left
	} else {
		delete(x.owed, slot)
	}
}

// bytes is the memory that the index takes.
func (x *index) bytes() int64 {
	const entrySize, tailSize = 52, keyTail
	n := int64(len(x.chunks)) * (slabChunk*entrySize + 16)
	for _, t := range x.tails {
		if t != nil {
			n += slabChunk * tailSize
		}
	}
	for i := range x.shards {
		t := &x.shards[i]
		n += int64(cap(t.cells))*2 + int64(cap(t.heads))*4 + 64
	}
	return n + int64(len(x.wide)+len(x.owed))*24
}
