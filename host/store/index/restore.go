package index

import (
	"errors"
	"fmt"

	"github.com/kvhost/kvhost/host/chunk"
)

// ErrRestore: a record cannot be entered, because its values contradict themselves or what was entered before.
var ErrRestore = errors.New("index record does not fit")

// Record is an entry with all that a checkpoint keeps of it.
type Record struct {
	Slot      uint32
	OwnerID   uint32 // of InternOwner
	State     uint8  // of [RecordState]
	Parent    uint64
	LastTouch uint32
	Units     uint32
	Depth     uint16
	Pieces    uint64
	Missing   uint64
	Expires   uint32
	Key       chunk.Key
}

// RecordState are the state bits that a record keeps.
const RecordState = Complete | FallbackName

// Record returns the entry in a slot.
func (x *Index) Record(slot uint32) Record {
	e := x.At(slot)
	return Record{
		Slot: slot, OwnerID: e.OwnerID(), State: e.State() & RecordState, Parent: e.Parent(), LastTouch: e.LastTouch(),
		Units: x.EntryUnits(slot, e), Depth: e.depth, Pieces: x.EntryPieces(slot, e), Missing: x.missing[slot],
		Expires: x.Expiries.At(slot), Key: x.Key(slot),
	}
}

// Reserve makes room for so many entries in an empty index.
func (x *Index) Reserve(entries int) {
	x.byKey.reserve(entries)
	x.families.small.reserve(entries)
}

// Restore enters a record in its old slot. Slots must come in order, and EndRestore must follow. After an error the
// index is of no use.
func (x *Index) Restore(r *Record) error {
	switch {
	case r.Slot >= x.max || r.Slot < x.high:
		return fmt.Errorf("%w: slot %d after slot %d of %d", ErrRestore, r.Slot, x.high, x.max)
	case int(r.OwnerID) >= len(x.list):
		return fmt.Errorf("%w: slot %d of owner %d of %d", ErrRestore, r.Slot, r.OwnerID, len(x.list))
	case r.Key == chunk.Root:
		return fmt.Errorf("%w: slot %d has no key", ErrRestore, r.Slot)
	}
	slot := r.Slot
	x.allocAt(slot, &r.Key)
	e := x.At(slot)
	e.setOwner(r.OwnerID)
	e.Set(Live | r.State&RecordState)
	e.setParent(r.Parent)
	e.SetLastTouch(r.LastTouch)
	e.depth = r.Depth
	if !x.byKey.insert(x.Fingerprint(slot), slot) {
		return fmt.Errorf("%w: slot %d: too many keys with nearly the same fingerprint", ErrRestore, slot)
	}
	x.families.add(slot)
	x.SetUnits(slot, r.Units)
	x.SetPieces(slot, r.Pieces)
	x.ReservePieces(slot, r.Missing)
	x.Expiries.Set(slot, int64(r.Expires))
	return nil
}

// EndRestore sets the clock and the number of slots ever used, and frees the slots that got no entry.
func (x *Index) EndRestore(clock, high uint32) {
	x.clock = clock
	x.freeGaps(high)
}
