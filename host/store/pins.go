package store

import (
	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/store/evictor"
	"github.com/kvhost/kvhost/host/store/index"
)

// unpin gives a pin of an entry back. The caller holds mu.
func (r *entries) unpin(slot uint32, fp uint64) { r.unpinAt(slot, fp, r.store.clock()) }

// unpinAt is unpin with the time given.
func (r *entries) unpinAt(slot uint32, fp, now uint64) {
	if !r.x.Unpin(slot) {
		return
	}
	e := r.x.At(slot)
	if e.Is(index.Evicting) {
		r.reap(slot)
		return
	}
	r.evictor.Post(abi.OpUnpin, slot, e, fp, &evictor.Cause{Tenant: r.tenantOf(slot), Time: now})
}
