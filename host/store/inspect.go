package store

import (
	"fmt"
	"maps"
	"math/bits"
	"slices"
)

// Inspection is what a store knows about one of its roots.
type Inspection struct {
	Dir      string
	Used     int64 // bytes in the root's account
	Missing  int64 // of those, bytes reserved for pieces that are not there
	Unsynced int   // entries that wait for a flush
	InUse    int   // entries that are pinned, being written or being removed
}

// Inspect is for tests. It compares the index of each root with itself and with the root's account, and calls visit with
// what it found, unless visit is nil. Until visit returns no root reserves or frees anything, so that visit can compare
// the account with the disk. Inspect looks at every entry and holds up every caller of the store.
func (s *Store) Inspect(visit func([]Inspection)) error {
	list := make([]Inspection, len(s.roots))
	for i, r := range s.roots {
		r.mu.Lock()
		defer r.mu.Unlock()
		if err := r.checkIndex(); err != nil {
			return fmt.Errorf("store: root %s contradicts itself: %w", r.dir, err)
		}
		list[i] = Inspection{Dir: r.dir, Used: r.used, Unsynced: len(r.unsynced), InUse: len(r.flights)}
		r.x.each(func(slot uint32, e *entry) {
			list[i].Missing += r.x.bytes(slot) - int64(bits.OnesCount64(r.x.pieces(slot)))*r.classOf(slot).fileBytes()
			if e.pins != 0 || e.any(stLeaving|stDetached) {
				list[i].InUse++
			}
		})
	}
	if visit != nil {
		visit(list)
	}
	return nil
}

// checkIndex compares a root's index with itself and with its account. mu is held.
func (r *root) checkIndex() error {
	var bytes, complete int64
	var live, kin int
	lacking := map[uint16]int64{}
	err := func() error {
		for slot := range r.x.high {
			e := r.x.at(slot)
			if !e.is(stLive) {
				continue
			}
			live++
			bytes += r.x.bytes(slot)
			if owed := r.x.owed[slot]; owed != 0 {
				lacking[r.x.ownerOf(slot).class] += int64(bits.OnesCount64(owed))
			}
			if e.is(stDetached) {
				if e.pins == 0 {
					return fmt.Errorf("slot %d is detached, and nobody has a pin on it", slot)
				}
				continue
			}
			k := r.x.key(slot)
			print := r.x.slotPrint(slot)
			if got := r.x.find(print, r.classOf(slot).base, &k); got != slot {
				return fmt.Errorf("slot %d is found as %d", slot, got)
			}
			if e.is(stComplete) && !e.is(stLeaving) {
				complete++
			}
			if parent := e.parentPrint(); parent != 0 {
				kin++
				seen := 0
				r.x.children(parent, func(s uint32) {
					if s == slot {
						seen++
					}
				})
				if seen != 1 {
					return fmt.Errorf("slot %d is %d times in its family", slot, seen)
				}
			}
			f, busy := r.flights[slot]
			if !e.is(stLeaving) && r.x.pieces(slot) == 0 && f.ranks == 0 {
				return fmt.Errorf("slot %d has no piece, and none is written", slot)
			}
			if busy && int(e.pins) < bits.OnesCount64(f.ranks) {
				return fmt.Errorf("slot %d has %d pins and %d writers", slot, e.pins, bits.OnesCount64(f.ranks))
			}
		}
		return nil
	}()
	if err != nil {
		return err
	}
	inTable, inFamilies := 0, 0
	for i := range r.x.shards {
		inTable += r.x.shards[i].n
		inFamilies += r.x.kin.shards[i].n
	}
	for _, c := range r.x.crowds {
		inFamilies += c.n
	}
	detached := live - inTable
	switch {
	case live != int(r.x.used):
		return fmt.Errorf("%d entries, the slab says %d", live, r.x.used)
	case detached < 0 || detached > 0 && len(r.flights) == 0 && !r.anyPins():
		return fmt.Errorf("%d entries and %d in the table", live, inTable)
	case inFamilies != kin:
		return fmt.Errorf("%d entries with a parent and %d in families", kin, inFamilies)
	case !maps.Equal(lacking, r.x.lacking):
		return fmt.Errorf("pieces lacking by class %v, the count says %v", lacking, r.x.lacking)
	case complete != r.complete:
		return fmt.Errorf("%d complete entries, the count says %d", complete, r.complete)
	case !r.sound():
		return fmt.Errorf("tenants' accounts %v do not fit their entries", r.owned)
	case bytes+r.quar.bytes+r.stray+r.unseen != r.used:
		return fmt.Errorf("entries %d, quarantine %d and strays %d make not the %d bytes used", bytes, r.quar.bytes, r.stray, r.used)
	}
	return nil
}

// sound compares the accounts of tenants with their entries.
func (r *root) sound() bool {
	if r.owned == nil {
		return true
	}
	sums := make([]int64, len(r.owned))
	for slot := range r.x.high {
		if e := r.x.at(slot); e.is(stLive) {
			sums[r.x.ownerOf(slot).tenant] += r.x.bytes(slot)
		}
	}
	return slices.Equal(sums, r.owned)
}

func (r *root) anyPins() (any bool) {
	r.x.each(func(_ uint32, e *entry) { any = any || e.pins > 0 })
	return any
}
