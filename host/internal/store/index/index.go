package index

import (
	"cmp"
	"math/bits"
	"slices"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/kv"
)

// Index holds one root's entries. Its methods must not be called concurrently.
type Index struct {
	slab
	ownerTable
	Expiries       Expiries
	Names          nameTable // of pieces of the entries that are [Named]
	byKey          table
	families       families
	pieceSets      pieceSets
	wide           map[uint32]uint64 // pieces present, of entries with a set that has no number
	large          map[uint32]uint32 // units that do not fit Entry.units
	pinned         map[uint32]uint32 // pins beyond the most that Entry.pins counts
	held           uint32            // entries with pins
	heldOf         []uint32          // of them, by the numbers of tenants
	missing        map[uint32]uint64 // pieces that bytes are reserved for and that are not there
	missingByClass map[uint16]int64  // how many those are
	clock          uint32            // the last tick given out
	fingerprint    func(class uint16, k kv.Key) uint64
	base           func(class uint16) uint16
}

const (
	manyPins   = 1<<8 - 1
	largeUnits = 1<<16 - 1
)

// New makes an index of at most max entries. fingerprint hashes a key of a class. base maps a class to the number that
// all classes of its group share: two entries with the same key and base are the same chunk.
func New(max uint32, fingerprint func(class uint16, k kv.Key) uint64, base func(class uint16) uint16) *Index {
	x := &Index{
		slab: slab{free: None, max: max}, ownerTable: ownerTable{ids: map[Owner]uint32{}}, pieceSets: pieceSets{number: map[uint64]uint8{0: 0}},
		wide: map[uint32]uint64{}, large: map[uint32]uint32{}, pinned: map[uint32]uint32{},
		missing: map[uint32]uint64{}, missingByClass: map[uint16]int64{}, fingerprint: fingerprint, base: base,
	}
	x.byKey.init(reachOf(max), x.Fingerprint)
	x.families.init(reachOf(max), func(slot uint32) uint64 { return x.At(slot).Parent() })
	return x
}

// leastReach is what the slots of any index can be raised to: its tables' cells have room for so many.
const leastReach = 1<<22 - 1

// reachOf is how many slots the tables of an index of so many entries can name.
func reachOf(entries uint32) uint32 { return max(leastReach, uint32(1)<<bits.Len32(entries)-1) }

// Reach is the most that Raise can make of Max.
func (x *Index) Reach() uint32 { return reachOf(x.max) }

// Raise lets the index have more entries, at most Reach.
func (x *Index) Raise(entries uint32) { x.max = max(x.max, min(entries, x.Reach())) }

// Fingerprint is the fingerprint of the key in a slot.
func (x *Index) Fingerprint(slot uint32) uint64 {
	return x.fingerprint(x.Owner(slot).Class, x.Key(slot))
}

// Find returns the slot of a key, or None. An entry that is being evicted is found; a detached one is not. base is that
// of the key's class.
func (x *Index) Find(fp uint64, base uint16, k *kv.Key) uint32 {
	t := &x.byKey
	s := t.shard(fp)
	n := s.buckets()
	if n == 0 {
		return None
	}
	b := s.bucket(firstBucket(fp, n))
	for second := false; ; second = true {
		for set := t.matches(b, fp); set != 0; set &= set - 1 {
			slot := t.slotOf(b[bits.TrailingZeros32(set)])
			if e := x.Match(slot, k); e != nil && x.HasBase(e, base) {
				return slot
			}
		}
		if second {
			return None
		}
		b = s.bucket(secondBucket(fp, n))
	}
}

// FindFingerprint returns the slot of a fingerprint, or None.
func (x *Index) FindFingerprint(fp uint64) uint32 {
	found := None
	if fp != 0 {
		x.byKey.search(fp, func(slot uint32) bool {
			if x.Fingerprint(slot) != fp {
				return false
			}
			found = slot
			return true
		})
	}
	return found
}

// Add makes an entry for a key that is not there. It returns None when all slots are in use, or when the table has no
// room for another key with nearly the same fingerprint, which does not happen by chance.
func (x *Index) Add(fp uint64, o Owner, k *kv.Key, parent uint64, depth uint32) uint32 {
	id, ok := x.InternOwner(o)
	if !ok {
		return None
	}
	slot := x.alloc(k)
	if slot == None {
		return None
	}
	if !x.byKey.insert(fp, slot) {
		x.dealloc(slot)
		return None
	}
	e := x.At(slot)
	e.setOwner(id)
	e.Set(Live)
	e.depth = uint16(min(depth, maxDepth))
	e.setParent(parent)
	x.families.add(slot)
	return slot
}

// Describe says what was not known of an entry that is [Listed]. It is false when there are too many owners.
func (x *Index) Describe(slot uint32, o Owner, parent uint64, depth uint32) bool {
	id, ok := x.InternOwner(o)
	if !ok {
		return false
	}
	e := x.At(slot)
	x.families.remove(slot)
	if e.pins > 0 {
		x.hold(e, ^uint32(0))
		defer x.hold(e, 1)
	}
	e.setOwner(id)
	e.depth = uint16(min(depth, maxDepth))
	e.setParent(parent)
	x.families.add(slot)
	e.Unset(Listed)
	return true
}

// Detach makes an entry one that is not found any more. The slot stays in use until Release.
func (x *Index) Detach(slot uint32) {
	x.byKey.remove(x.Fingerprint(slot), slot)
	x.families.remove(slot)
	x.At(slot).Set(Detached)
}

// Release frees the slot of a detached entry.
func (x *Index) Release(slot uint32) {
	x.SetPieces(slot, 0)
	x.SetUnits(slot, 0)
	x.setMissing(slot, 0)
	if x.At(slot).Is(Named) {
		x.Names.Remove(slot)
	}
	x.dealloc(slot)
}

// Touch makes an entry the most recently used. Ticks are a logical clock of 32 bits. When it runs out all are halved:
// that may make neighbours equal but changes no order.
func (x *Index) Touch(slot uint32) { x.TouchEntry(x.At(slot)) }

// TouchEntry is Touch for a caller that has the entry.
func (x *Index) TouchEntry(e *Entry) {
	if x.clock == 1<<32-1 {
		x.Each(func(_ uint32, e *Entry) { e.SetLastTouch(e.LastTouch() / 2) })
		x.clock /= 2
	}
	x.clock++
	e.SetLastTouch(x.clock)
}

// Clock is the last tick given out.
func (x *Index) Clock() uint32 { return x.clock }

// AdvanceClock makes all later ticks greater than this one.
func (x *Index) AdvanceClock(tick uint32) { x.clock = max(x.clock, tick) }

// ByLastTouch lists the entries that are not being evicted, least recently touched first.
func (x *Index) ByLastTouch() []uint32 {
	order := make([]uint32, 0, x.used)
	x.Each(func(slot uint32, e *Entry) {
		if !e.Is(Evicting) {
			order = append(order, slot)
		}
	})
	slices.SortFunc(order, func(a, b uint32) int {
		ea, eb := x.At(a), x.At(b)
		return cmp.Or(cmp.Compare(ea.LastTouch(), eb.LastTouch()), cmp.Compare(ea.depth, eb.depth), cmp.Compare(a, b))
	})
	return order
}

// Each calls visit for every slot in use, in order.
func (x *Index) Each(visit func(slot uint32, e *Entry)) {
	for slot := range x.high {
		if e := x.At(slot); e.Is(Live) {
			visit(slot, e)
		}
	}
}

// Pin adds a pin and says whether it is the first.
func (x *Index) Pin(slot uint32) bool { return x.PinEntry(slot, x.At(slot)) }

// PinEntry is Pin for a caller that has the entry.
func (x *Index) PinEntry(slot uint32, e *Entry) bool {
	if e.pins == manyPins {
		x.pinned[slot]++
		return false
	}
	e.pins++
	if e.pins == 1 {
		x.hold(e, 1)
	}
	return e.pins == 1
}

// Unpin removes a pin and says whether it was the last.
func (x *Index) Unpin(slot uint32) bool {
	e := x.At(slot)
	if e.pins == manyPins && x.pinned[slot] > 0 {
		if x.pinned[slot]--; x.pinned[slot] == 0 {
			delete(x.pinned, slot)
		}
		return false
	}
	e.pins--
	if e.pins == 0 {
		x.hold(e, ^uint32(0))
	}
	return e.pins == 0
}

// hold counts an entry with pins, or one less.
func (x *Index) hold(e *Entry, by uint32) {
	tenant := int(x.list[e.OwnerID()].Tenant)
	for tenant >= len(x.heldOf) {
		x.heldOf = append(x.heldOf, 0)
	}
	x.heldOf[tenant] += by
	x.held += by
}

// Held is how many entries have pins.
func (x *Index) Held() uint32 { return x.held }

// HeldOf is how many entries of a tenant, by its number, have pins.
func (x *Index) HeldOf(tenant uint16) uint32 {
	if int(tenant) >= len(x.heldOf) {
		return 0
	}
	return x.heldOf[tenant]
}

// Units is the size that is reserved for an entry, in abi.SizeUnit.
func (x *Index) Units(slot uint32) uint32 { return x.EntryUnits(slot, x.At(slot)) }

// EntryUnits is Units for a caller that has the entry.
func (x *Index) EntryUnits(slot uint32, e *Entry) uint32 {
	if e.units == largeUnits {
		return x.large[slot]
	}
	return uint32(e.units)
}

// SetUnits sets the size that is reserved for an entry.
func (x *Index) SetUnits(slot, units uint32) {
	e := x.At(slot)
	if e.units == largeUnits {
		delete(x.large, slot)
	}
	if e.units = uint16(min(units, largeUnits)); e.units == largeUnits {
		x.large[slot] = units
	}
}

// Bytes is the size that is reserved for an entry.
func (x *Index) Bytes(slot uint32) int64 { return int64(x.Units(slot)) * abi.SizeUnit }

// Resize changes the size that is reserved for an entry by whole units, to zero at the least.
func (x *Index) Resize(slot uint32, bytes int64) {
	x.SetUnits(slot, uint32(max(0, int64(x.Units(slot))+bytes/abi.SizeUnit)))
}

// Memory is the bytes that the index takes.
func (x *Index) Memory() int64 {
	n := x.slab.memory() + x.byKey.memory() + x.families.memory() + x.Expiries.memory() + x.Names.Memory()
	return n + int64(len(x.wide)+len(x.missing)+len(x.large)+len(x.pinned))*24
}
