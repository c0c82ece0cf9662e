package store

import (
	"context"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/store/capacity"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/health"
)

// want returns a request for the bytes of an entry of a tenant.
func (r *root) want(tenant uint16, bytes int64) capacity.Want {
	w := capacity.Want{Bytes: bytes, Tenant: tenant, Quota: -1}
	if live := r.store.live.Load(); len(live.Quotas) > 0 {
		w.ID = r.store.catalog.Tenants.Tenant(tenant)
		w.Quota = capacity.Quotas(live.Quotas).Of(w.ID, r.Account.Figures().Capacity, live.Capacity())
	}
	return w
}

// booked completes a reservation after its bytes were booked. The lock must be held.
func (w *reservation) booked(r *root) error {
	if w.enter != nil {
		if err := w.enter(); err != nil {
			r.Account.Add(capacity.Orphans, w.Taken)
			r.Account.Release(w.Tenant, w.Bytes)
			return err
		}
	}
	w.Taken = 0
	return nil
}

// evictDown evicts down to the limit after reserved pieces took more bytes than expected.
func (r *root) evictDown(ctx context.Context) {
	if r.turn(ctx, abi.None) != nil {
		return
	}
	defer r.endTurn()
	if err := r.owner.reserve(ctx, reservation{Want: capacity.Want{Quota: -1}}); err != nil {
		r.Log.Warn("root is over its capacity: nothing can be evicted", "used", r.Account.Figures().Used,
			"capacity", r.Account.Figures().Capacity, "error", err)
	}
}

// shrink brings the root within its limit, as far as this host is responsible, and reports whether it is within it. A file that
// could not be unlinked, or files of others, can put a root over its limit.
func (r *root) shrink(ctx context.Context) bool {
	if r.within() {
		return true
	}
	r.evictDown(ctx)
	return r.within()
}

func (r *root) within() bool {
	return r.cfg.Shared || r.IsScanning() || r.Account.Excess(1) <= r.twice.Load()
}

// turn takes the turn to reserve and evict. One reservation at a time evicts, and tenants alternate.
func (r *root) turn(ctx context.Context, tenant uint32) error {
	if r.evicting == nil {
		return nil
	}
	return r.evicting.Take(ctx, tenant)
}

func (r *root) endTurn() {
	if r.evicting != nil {
		r.evicting.Give()
	}
}

// drop removes an entry that does not, or no longer, match its files. The lock must not be held.
func (r *root) drop(m entries.Mark) {
	r.Evict(m, func(v *entries.Eviction) { _, _ = r.owner.unlink(v, v.Pieces) }) // it logs failures and retries
}

// dropDamaged removes an entry because the file of one rank is damaged. The file goes to quarantine.
func (r *root) dropDamaged(m entries.Mark, rank uint32, name string, cause error) {
	r.Evict(m, func(v *entries.Eviction) {
		r.Counted(&r.Count.Damaged)
		r.unlinkDamaged(v, rank, name, cause)
	})
}

// unlinkDamaged removes the files of an evicted entry, of which one is damaged. This host keeps the damaged file if it owns the
// root. For a borrowed file, the lender is blamed.
func (r *root) unlinkDamaged(v *entries.Eviction, rank uint32, name string, cause error) {
	switch {
	case r.cfg.Lender != nil:
		r.cfg.Lender.Blame(name, cause)
	case r.cfg.Shared:
		r.Log.Warn("damaged piece: the evictor is asked to remove it", "file", name, "cause", cause)
	default:
		k, _ := r.Quarantine.Move(name, v.Class.FileBytes(), cause)
		_, _ = r.owner.unlink(v, v.Pieces&^(1<<rank)) // it logs failures and retries
		r.Lock()
		r.Release(v, k.Bytes) // now in the quarantine
		excess := r.Quarantine.Add(k)
		r.Unlock()
		r.Quarantine.Remove(excess)
		return
	}
	_, _ = r.owner.unlink(v, v.Pieces)
}

// freeSpace watches the free space of a root's file system.
type freeSpace struct{ *root }

// refresh measures the free space if the last measurement is too old for a put.
func (r freeSpace) refresh() {
	if r.Account.Stale() {
		r.measure()
	}
}

// measure measures the free space.
func (r freeSpace) measure() {
	r.Lock()
	settled := r.Account.Settled(r.Unwritten())
	r.Unlock()
	space, err := r.FS.Statfs(r.Path)
	if err != nil {
		return // the last measurement stays in effect
	}
	r.Lock()
	defer r.Unlock()
	if r.cfg.Volatile {
		r.Account.Owns(space.Total)
		return
	}
	r.Account.Measured(space.Total, space.Available, settled)
}

// full records that the file system was full although the account had room.
func (r freeSpace) full(entry int64, cause error) {
	r.Lock()
	r.Account.Full(entry, r.Unwritten(), r.store.cfg.UpkeepEvery, health.MaxPause*r.store.cfg.UpkeepEvery)
	r.Unlock()
	r.Health.Demote(health.Full, "its file system is full before its capacity is reached", cause,
		"make room on the file system, or lower the root's capacity or raise its min_free")
}

// watch is the free-space part of the upkeep. It maintains the floor while others write, and checks whether a full file system
// has room again.
func (r freeSpace) watch(ctx context.Context) {
	if !r.Health.Takes() {
		return
	}
	if r.Account.Floor() && r.turn(ctx, abi.None) == nil { // in its turn, so that no victims are leaving
		r.measure()
		r.endTurn()
	}
	if r.Account.Retry() {
		r.Health.Promote(health.Full, health.In)
	}
	r.shrink(ctx)
}
