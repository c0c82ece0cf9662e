package store

import (
	"math/bits"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/chunk"
)

// index says what a root holds: entries by slot, slots by key, families by parent. It knows nothing of files, bytes or
// events, and is guarded by its root's mutex.
//
// An entry with a key of 32 bytes takes 54 in the slab and 8.6 to 9.6 in the two tables; keys of 16 bytes take 16 less.
// Where entries expire the root has 4 more for each slot: see [expiries].
type index struct {
	slab
	table
	kin     table             // by the parent's fingerprint: see family.go
	crowds  map[uint64]*crowd // large families
	owners  owners
	ranks   rankSets
	wide    map[uint32]uint64 // pieces present, of entries whose set has no number
	large   map[uint32]uint32 // sizes that do not fit entry.size
	pinned  map[uint32]uint32 // pins beyond the most that entry.pins counts
	owed    map[uint32]uint64 // pieces that bytes are reserved for and that are not there, of entries that have such
	lacking map[uint16]int64  // how many those are, by class
	clock   uint32            // the last tick given out
	hash    func(class uint16, k chunk.Key) uint64
	base    func(class uint16) uint16 // see class
}

const (
	manyPins  = 1<<8 - 1
	largeSize = 1<<16 - 1
)

func newIndex(max uint32, hash func(class uint16, k chunk.Key) uint64, base func(class uint16) uint16) *index {
	x := &index{
		slab: slab{free: none, max: max}, crowds: map[uint64]*crowd{}, owners: newOwners(), wide: map[uint32]uint64{},
		large: map[uint32]uint32{}, pinned: map[uint32]uint32{}, owed: map[uint32]uint64{}, lacking: map[uint16]int64{}, hash: hash, base: base,
	}
	x.ranks.init()
	x.table.init(max, x.slotPrint)
	x.kin.init(max, func(slot uint32) uint64 { return x.at(slot).parentPrint() })
	return x
}

func (x *index) slotPrint(slot uint32) uint64 {
	return x.hash(x.ownerOf(slot).class, x.key(slot))
}

// find gives the slot of a key, or none. A leaving entry is found; a detached one is not. base is of the key's class.
func (x *index) find(print uint64, base uint16, k *chunk.Key) uint32 {
	s := x.shard(print)
	n := s.buckets()
	if n == 0 {
		return none
	}
	b := s.bucket(home(print, n))
	for second := false; ; second = true {
		for set := x.having(b, print); set != 0; set &= set - 1 {
			slot := x.slotOf(b[bits.TrailingZeros32(set)])
			if e := x.match(slot, k); e != nil && x.isOf(e, base) {
				return slot
			}
		}
		if second {
			return none
		}
		b = s.bucket(other(print, n))
	}
}

// findPrint gives the slot of a fingerprint, or none.
func (x *index) findPrint(print uint64) uint32 {
	found := none
	if print != 0 {
		x.seek(print, func(slot uint32) bool {
			if x.slotPrint(slot) != print {
				return false
			}
			found = slot
			return true
		})
	}
	return found
}

// add makes an entry for a key that is not there; none when the slots are out, or when more fingerprints than a table can
// hold apart are nearly equal (which takes somebody who wants them to be).
func (x *index) add(print uint64, o owner, k *chunk.Key, parent uint64, depth uint32) uint32 {
	id, ok := x.owners.intern(o)
	if !ok {
		return none
	}
	slot := x.take(k)
	if slot == none {
		return none
	}
	if !x.insert(print, slot) {
		x.give(slot)
		return none
	}
	e := x.at(slot)
	e.setOwner(id)
	e.set(stLive)
	e.deep = uint16(min(depth, maxDepth))
	e.setParent(parent)
	x.join(slot)
	return slot
}

// detach takes an entry out of the table and its family; the slot stays taken until release.
func (x *index) detach(slot uint32) {
	x.remove(x.slotPrint(slot), slot)
	x.part(slot)
	x.at(slot).set(stDetached)
}

// release gives the slot of a detached entry back.
func (x *index) release(slot uint32) {
	x.setPieces(slot, 0)
	x.setUnits(slot, 0)
	x.setOwed(slot, 0)
	x.give(slot)
}

// touch makes an entry the most recent. Ticks are a logical clock of 32 bits; when it runs out, all are halved, which
// may make old neighbours equal but never changes places.
func (x *index) touch(slot uint32) { x.touchEntry(x.at(slot)) }

func (x *index) touchEntry(e *entry) {
	if x.clock == 1<<32-1 {
		x.each(func(slot uint32, e *entry) { e.setTouched(e.touched() / 2) })
		x.clock /= 2
	}
	x.clock++
	e.setTouched(x.clock)
}

// each calls visit for every slot in use.
func (x *index) each(visit func(slot uint32, e *entry)) {
	for slot := range x.high {
		if e := x.at(slot); e.is(stLive) {
			visit(slot, e)
		}
	}
}

// pin counts one pin more and says whether it is the first.
func (x *index) pin(slot uint32) bool { return x.pinEntry(slot, x.at(slot)) }

func (x *index) pinEntry(slot uint32, e *entry) bool {
	if e.pins == manyPins {
		x.pinned[slot]++
		return false
	}
	e.pins++
	return e.pins == 1
}

// unpin counts one pin less and says whether it was the last.
func (x *index) unpin(slot uint32) bool {
	e := x.at(slot)
	if e.pins == manyPins && x.pinned[slot] > 0 {
		if x.pinned[slot]--; x.pinned[slot] == 0 {
			delete(x.pinned, slot)
		}
		return false
	}
	e.pins--
	return e.pins == 0
}

// units is the size that is reserved for an entry, in abi.SizeUnit.
func (x *index) units(slot uint32) uint32 { return x.unitsOf(slot, x.at(slot)) }

func (x *index) unitsOf(slot uint32, e *entry) uint32 {
	if e.size == largeSize {
		return x.large[slot]
	}
	return uint32(e.size)
}

func (x *index) setUnits(slot, units uint32) {
	e := x.at(slot)
	if e.size == largeSize {
		delete(x.large, slot)
	}
	if e.size = uint16(min(units, largeSize)); e.size == largeSize {
		x.large[slot] = units
	}
}

// bytes is what is reserved for an entry.
func (x *index) bytes(slot uint32) int64 { return int64(x.units(slot)) * abi.SizeUnit }

// resize changes what is reserved for an entry by so many bytes, whole units of them, down to nothing at most.
func (x *index) resize(slot uint32, by int64) {
	x.setUnits(slot, uint32(max(0, int64(x.units(slot))+by/abi.SizeUnit)))
}

// memory is the bytes that the index takes.
func (x *index) memory() int64 {
	n := x.slab.memory() + x.table.memory() + x.kin.memory()
	for _, c := range x.crowds {
		n += int64(cap(c.cells))*4 + 64
	}
	return n + int64(len(x.wide)+len(x.owed)+len(x.large)+len(x.pinned))*24
}
