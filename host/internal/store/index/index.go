package index

import (
	"cmp"
	"math/bits"
	"slices"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/kv"
)

// Index holds the entries of one root. Its methods must not be called concurrently.
type Index struct {
	slab
	ownerTable
	Expiries       Expiries
	Names          nameTable // names of pieces of entries with the state [Named]
	byKey          table
	families       families
	pieceSets      pieceSets
	wide           map[uint32]uint64 // present pieces of entries for which pieceSets has no number
	large          map[uint32]uint32 // sizes that do not fit Entry.units
	pinned         map[uint32]uint32 // pins beyond the maximum of Entry.pins
	held           uint32            // number of entries with pins
	heldOf         []uint32          // the same by tenant number
	missing        map[uint32]uint64 // missing pieces with reserved bytes
	missingByClass map[uint16]int64  // number of such pieces
	clock          uint32            // last tick
	fingerprint    func(class uint16, k kv.Key) uint64
	base           func(class uint16) uint16
}

const (
	manyPins   = 1<<8 - 1
	largeUnits = 1<<16 - 1
)

// New returns an index for at most max entries. fingerprint hashes a key of a class. base maps a class to the number that all
// classes of its group share: two entries with the same key and base are the same chunk.
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

// leastReach is the least reach of an index. Smaller indexes have tables with room for this many slots, too.
const leastReach = 1<<22 - 1

// reachOf returns the number of slots that the tables of an index can address, given its maximum of entries.
func reachOf(entries uint32) uint32 { return max(leastReach, uint32(1)<<bits.Len32(entries)-1) }

// Reach returns the highest Max that Raise can set.
func (x *Index) Reach() uint32 { return reachOf(x.max) }

// Raise raises Max, at most to Reach.
func (x *Index) Raise(entries uint32) { x.max = max(x.max, min(entries, x.Reach())) }

// Fingerprint returns the fingerprint of the key in a slot.
func (x *Index) Fingerprint(slot uint32) uint64 {
	return x.fingerprint(x.Owner(slot).Class, x.Key(slot))
}

// Find returns the slot of a key, or None. It finds entries that are being evicted, but no detached ones. base is the base of
// the key's class.
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

// Add adds an entry for a key that is not in the index. It returns None if all slots are in use. It also does so if the table
// has no room for another key with nearly the same fingerprint, which does not happen by chance.
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

// Describe sets the properties of a [Listed] entry that were unknown. It returns false if there are too many owners.
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

// Detach makes an entry invisible to searches. The slot stays in use until Release.
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

// Touch makes an entry the most recently used. Ticks are a logical clock of 32 bits. When the clock runs out, all ticks are
// halved. That may make neighbours equal, but changes no order.
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

// Clock returns the last tick.
func (x *Index) Clock() uint32 { return x.clock }

// AdvanceClock makes all later ticks greater than this one.
func (x *Index) AdvanceClock(tick uint32) { x.clock = max(x.clock, tick) }

// ByLastTouch returns the entries that are not being evicted, least recently touched first.
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

// Pin adds a pin and reports whether it is the first.
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

// Unpin removes a pin and reports whether it was the last.
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

// hold changes the number of entries with pins by 1 or -1.
func (x *Index) hold(e *Entry, by uint32) {
	tenant := int(x.list[e.OwnerID()].Tenant)
	for tenant >= len(x.heldOf) {
		x.heldOf = append(x.heldOf, 0)
	}
	x.heldOf[tenant] += by
	x.held += by
}

// Held returns the number of entries with pins.
func (x *Index) Held() uint32 { return x.held }

// HeldOf returns the number of entries with pins of a tenant, given its number.
func (x *Index) HeldOf(tenant uint16) uint32 {
	if int(tenant) >= len(x.heldOf) {
		return 0
	}
	return x.heldOf[tenant]
}

// Units returns the size that is reserved for an entry in abi.SizeUnit.
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

// Bytes returns the size that is reserved for an entry in bytes.
func (x *Index) Bytes(slot uint32) int64 { return int64(x.Units(slot)) * abi.SizeUnit }

// Resize changes the size that is reserved for an entry by whole units. The size does not fall below zero.
func (x *Index) Resize(slot uint32, bytes int64) {
	x.SetUnits(slot, uint32(max(0, int64(x.Units(slot))+bytes/abi.SizeUnit)))
}

// Memory returns the size of the index in bytes.
func (x *Index) Memory() int64 {
	n := x.slab.memory() + x.byKey.memory() + x.families.memory() + x.Expiries.memory() + x.Names.Memory()
	return n + int64(len(x.wide)+len(x.missing)+len(x.large)+len(x.pinned))*24
}
