package store

import (
	"fmt"
	"maps"
	"math/bits"
	"slices"
)

// check compares a root's index with itself and with its account. Nothing may hold root.mu.
func (r *root) check() error {
	r.mu.Lock()
	defer r.mu.Unlock()
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

// idle checks that nothing is pinned, in flight or leaving.
func (r *root) idle() error {
	if err := r.check(); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.flights) > 0 {
		return fmt.Errorf("%d entries are in flight", len(r.flights))
	}
	var err error
	r.x.each(func(slot uint32, e *entry) {
		if e.pins != 0 || e.any(stLeaving|stDetached) {
			err = fmt.Errorf("slot %d: %d pins, state %#x", slot, e.pins, e.what[0])
		}
	})
	return err
}
