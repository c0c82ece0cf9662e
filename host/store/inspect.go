package store

import (
	"errors"
	"fmt"
	"math/bits"

	"github.com/kvhost/kvhost/host/store/index"
)

// Inspection is what a store knows about one of its roots.
type Inspection struct {
	Dir      string
	Used     int64 // bytes in the root's account
	Missing  int64 // of those, bytes reserved for pieces that are not there
	Unsynced int   // entries that wait for a flush
	InUse    int   // entries that are pinned, being written or being removed
}

// Inspect is for tests. It calls visit, unless that is nil, with what it finds in each root; until visit returns no
// root reserves or frees anything, so that visit can compare the account with the disk. The error says where the index
// of a root contradicts itself or the root's account: between operations it never does, within one it may. Inspect
// looks at every entry and holds up every caller of the store.
func (s *Store) Inspect(visit func([]Inspection)) error {
	var err error
	list := make([]Inspection, len(s.roots))
	for i, r := range s.roots {
		r.mu.Lock()
		defer r.mu.Unlock()
		if rerr := r.checkIndex(r.quar.bytes); rerr != nil {
			err = errors.Join(err, fmt.Errorf("store: root %s contradicts itself: %w", r.dir, rerr))
		}
		list[i] = Inspection{Dir: r.dir, Used: r.account.Used(), Unsynced: len(r.unsynced), InUse: len(r.flights)}
		r.x.Each(func(slot uint32, e *index.Entry) {
			list[i].Missing += r.x.Bytes(slot) - int64(bits.OnesCount64(r.x.Pieces(slot)))*r.classOf(slot).FileBytes()
			if e.Pins() != 0 || e.Any(index.Evicting|index.Detached) {
				list[i].InUse++
			}
		})
	}
	if visit != nil {
		visit(list)
	}
	return err
}

// checkIndex compares a root's index with itself and with its account. mu is held.
func (r *entries) checkIndex(quarantine int64) error {
	if err := r.x.Check(); err != nil {
		return err
	}
	var complete int64
	var tenants []int64
	for slot := range r.x.High() {
		e := r.x.At(slot)
		if !e.Is(index.Live) {
			continue
		}
		tenant := int(r.x.Owner(slot).Tenant)
		for tenant >= len(tenants) {
			tenants = append(tenants, 0)
		}
		tenants[tenant] += r.x.Bytes(slot)
		if e.Is(index.Detached) {
			continue
		}
		if e.Is(index.Complete) && !e.Is(index.Evicting) {
			complete++
		}
		f, busy := r.flights[slot]
		if !e.Is(index.Evicting) && r.x.Pieces(slot) == 0 && f.ranks == 0 {
			return fmt.Errorf("slot %d has no piece, and none is written", slot)
		}
		if busy && int(e.Pins()) < bits.OnesCount64(f.ranks) {
			return fmt.Errorf("slot %d has %d pins and %d writers", slot, e.Pins(), bits.OnesCount64(f.ranks))
		}
	}
	if complete != r.complete {
		return fmt.Errorf("%d complete entries, the count says %d", complete, r.complete)
	}
	return r.account.Check(tenants, quarantine)
}
