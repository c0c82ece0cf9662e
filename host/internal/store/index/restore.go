package index

import (
	"errors"
	"fmt"
	"unsafe"

	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
)

// ErrRestore means that a record is inconsistent, in itself or with an earlier one.
var ErrRestore = errors.New("index record does not fit")

// RecordState are the state bits that a record keeps. They have the same values in a checkpoint.
const RecordState = Complete | Named

var _ [RecordState]struct{} = [pieceformat.StateComplete | pieceformat.StateNamed]struct{}{}

// Record returns the checkpoint record of the entry in a slot.
func (x *Index) Record(slot uint32) pieceformat.CheckpointEntry {
	e := x.At(slot)
	rec := pieceformat.CheckpointEntry{
		Slot: slot, OwnerID: e.OwnerID(), State: e.State() & RecordState, Parent: e.Parent(), LastTouch: e.LastTouch(),
		Units: x.EntryUnits(slot, e), Depth: e.depth, Pieces: x.EntryPieces(slot, e), Missing: x.missing[slot],
		Expires: x.Expiries.At(slot), Key: x.Key(slot),
	}
	if e.Is(Named) {
		rec.Names = x.Names.List(slot, &rec.Key)
	}
	return rec
}

// Restoring enters checkpoint records into an empty index. Most of its time is spent waiting for memory, so it collects the
// cells of the last records and inserts them after the processor has loaded their buckets.
type Restoring struct {
	x      *Index
	groups [2]restoreGroup // one is loading while the other is inserted
	n      int             // number of records so far
}

type restoreGroup struct {
	n     int
	slots [PrefetchStep]uint32
	fps   [PrefetchStep]uint64
}

// Restore begins to enter records, and makes room for the given number of entries. Nothing else may use the index until End.
func (x *Index) Restore(entries int) *Restoring {
	x.byKey.reserve(entries)
	x.families.small.reserve(entries)
	return &Restoring{x: x}
}

// Enter enters a record into its old slot. Slots must come in ascending order. After an error the index must not be used.
func (r *Restoring) Enter(rec *pieceformat.CheckpointEntry) error {
	x := r.x
	switch {
	case rec.Slot >= x.max || rec.Slot < x.high:
		return fmt.Errorf("%w: slot %d after slot %d of %d", ErrRestore, rec.Slot, x.high, x.max)
	case int(rec.OwnerID) >= len(x.list):
		return fmt.Errorf("%w: slot %d of owner %d of %d", ErrRestore, rec.Slot, rec.OwnerID, len(x.list))
	case rec.Key == kv.Root:
		return fmt.Errorf("%w: slot %d has no key", ErrRestore, rec.Slot)
	case rec.State&Named != 0 != (len(rec.Names) > 0):
		return fmt.Errorf("%w: slot %d in state %d has %d names", ErrRestore, rec.Slot, rec.State, len(rec.Names))
	}
	slot := rec.Slot
	x.allocAt(slot, &rec.Key)
	e := x.At(slot)
	e.setOwner(rec.OwnerID)
	e.Set(Live | rec.State&RecordState)
	e.setParent(rec.Parent)
	e.SetLastTouch(rec.LastTouch)
	e.depth = rec.Depth
	x.SetUnits(slot, rec.Units)
	x.SetPieces(slot, rec.Pieces)
	x.ReservePieces(slot, rec.Missing)
	x.Expiries.Set(slot, int64(rec.Expires))
	for _, n := range rec.Names {
		x.Names.Add(slot, &rec.Key, n)
	}

	g := &r.groups[r.n/PrefetchStep%2]
	g.slots[g.n], g.fps[g.n] = slot, x.Fingerprint(slot)
	g.n++
	if r.n++; g.n < PrefetchStep {
		return nil
	}
	r.load(g)
	return r.insert(&r.groups[r.n/PrefetchStep%2])
}

// load makes the processor load the buckets of a whole group.
func (r *Restoring) load(g *restoreGroup) {
	var byKey, first, second [PrefetchStep]unsafe.Pointer
	for i, fp := range g.fps {
		byKey[i] = unsafe.Pointer(r.x.byKey.first(fp))
		if parent := r.x.families.of(g.slots[i]); parent != 0 && r.x.families.small.shard(parent).buckets() > 0 {
			first[i] = unsafe.Pointer(r.x.families.small.first(parent))
			second[i] = unsafe.Pointer(r.x.families.small.second(parent))
		}
	}
	prefetchLines(&byKey, 0)
	prefetchLines(&first, 0)
	prefetchLines(&second, 0)
}

// insert inserts the cells of a group into the tables.
func (r *Restoring) insert(g *restoreGroup) error {
	for i, slot := range g.slots[:g.n] {
		if !r.x.byKey.insert(g.fps[i], slot) {
			return fmt.Errorf("%w: slot %d: too many keys with nearly the same fingerprint", ErrRestore, slot)
		}
		r.x.families.add(slot)
	}
	g.n = 0
	return nil
}

// End inserts the remaining records, sets the clock and the number of slots ever used, and frees the slots without an entry.
func (r *Restoring) End(clock, high uint32) error {
	for i := range r.groups {
		if err := r.insert(&r.groups[(r.n/PrefetchStep+1+i)%2]); err != nil {
			return err
		}
	}
	r.x.clock = clock
	r.x.freeGaps(high)
	return nil
}
