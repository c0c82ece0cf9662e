package store

import (
	"context"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/store/capacity"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/health"
)

// reservation is what a put needs of a root.
type reservation struct {
	capacity.Want
	slot     bool         // a slot, too
	spares   uint32       // it does not evict what has no copy in the next level yet and so many hits; 0: it evicts that, too
	reuseFor *Put         // it may get a victim's file; may be nil
	enter    func() error // called with the lock held as soon as all is reserved; what fails is not
}

// want is bytes for an entry of a tenant.
func (r *root) want(tenant uint16, bytes int64) capacity.Want {
	w := capacity.Want{Bytes: bytes, Tenant: tenant, Quota: -1}
	if live := r.store.live.Load(); len(live.Quotas) > 0 {
		w.ID = r.store.catalog.Tenants.Tenant(tenant)
		w.Quota = capacity.Quotas(live.Quotas).Of(w.ID, r.Account.Figures().Capacity, live.Capacity())
	}
	return w
}

// booked ends a reservation with bytes that are booked. The lock is held.
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

// evictDown evicts down to the limit: what was reserved took more than it should have.
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

// shrink brings the root within its limit as far as this host keeps it, and says whether it is: a file that could not be unlinked, or a
// file system that others fill, puts a root over its limit.
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

// turn takes the turn to reserve and evict: one reservation at a time evicts, and tenants take turns.
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

// drop removes an entry at once that is not, or no longer, what the index says. keep names the ranks of files that the caller
// removes. The caller does not hold the lock.
func (r *root) drop(m entries.Mark, keep uint64) {
	r.Evict(m, func(v *entries.Eviction) { _, _ = r.owner.unlink(v, v.Pieces&^keep) }) // it logs what fails, and retries
}

// dropDamaged removes an entry because of one rank's file, which goes into quarantine.
func (r *root) dropDamaged(m entries.Mark, rank uint32, name string, cause error) {
	r.Evict(m, func(v *entries.Eviction) {
		r.Counted(&r.Count.Damaged)
		r.unlinkDamaged(v, rank, name, cause)
	})
}

// unlinkDamaged removes an evicted entry's files, one of which is damaged and kept where it is this host's. Of a file that is lent
// the lender gets the blame.
func (r *root) unlinkDamaged(v *entries.Eviction, rank uint32, name string, cause error) {
	switch {
	case r.cfg.Lender != nil:
		r.cfg.Lender.Blame(name, cause)
	case r.cfg.Shared:
		r.Log.Warn("damaged piece: the evictor is asked to remove it", "file", name, "cause", cause)
	default:
		k, _ := r.Quarantine.Move(name, v.Class.FileBytes(), cause)
		_, _ = r.owner.unlink(v, v.Pieces&^(1<<rank)) // it logs what fails, and retries
		r.Lock()
		r.Release(v, k.Bytes) // the quarantine has them
		excess := r.Quarantine.Add(k)
		r.Unlock()
		r.Quarantine.Remove(excess)
		return
	}
	_, _ = r.owner.unlink(v, v.Pieces)
}

// freeSpace watches what a root's file system has left.
type freeSpace struct{ *root }

// refresh measures what the file system has left when a put may not go by the last measurement.
func (r freeSpace) refresh() {
	if r.Account.Stale() {
		r.measure()
	}
}

// measure asks the file system what it has left.
func (r freeSpace) measure() {
	space, err := r.FS.Statfs(r.Path)
	if err != nil {
		return // the last measurement stands
	}
	r.Lock()
	defer r.Unlock()
	if r.cfg.Volatile {
		r.Account.Owns(space.Total)
		return
	}
	r.Account.Measured(space.Total, space.Available, r.Unwritten())
}

// full is called when the file system was full although the account had room.
func (r freeSpace) full(entry int64, cause error) {
	r.Lock()
	r.Account.Full(entry, r.Unwritten(), r.store.cfg.UpkeepEvery, health.MaxPause*r.store.cfg.UpkeepEvery)
	r.Unlock()
	r.Health.Demote(health.Full, "its file system is full before its capacity is reached", cause,
		"make room on the file system, or lower the root's capacity or raise its min_free")
}

// watch is the upkeep's part: it keeps the floor when others write, and tries whether there is room again.
func (r freeSpace) watch(ctx context.Context) {
	if !r.Health.Takes() {
		return
	}
	if r.Account.Floor() {
		r.measure()
	}
	if r.Account.Retry() {
		r.Health.Promote(health.Full, health.In)
	}
	r.shrink(ctx)
}
