package store

import (
	"context"
	"fmt"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/store/capacity"
	"github.com/kvhost/kvhost/host/store/moves"
)

// reservation is what a put needs of a root.
type reservation struct {
	capacity.Want
	slot     bool         // a slot, too
	evicts   bool         // it may evict: its caller holds turn
	spares   bool         // it does not evict what has no copy in the next level yet
	reuseFor *Put         // it may get a victim's file; nil: nobody
	enter    func() error // called with the lock held as soon as all is reserved; what fails is not
}

// want is bytes for an entry of a tenant.
func (r *root) want(tenant uint16, bytes int64) capacity.Want {
	w := capacity.Want{Bytes: bytes, Tenant: tenant, Quota: -1}
	if live := r.store.live.Load(); len(live.Quotas) > 0 {
		w.ID = r.store.catalog.Tenants.Tenant(tenant)
		w.Quota = capacity.Quotas(live.Quotas).Of(w.ID, r.Account.Capacity(), live.Capacity())
	}
	return w
}

// evicting makes room for what is wanted and books it. It evicts for that, or waits for the background
// evictor. The lock is not held.
func (w reservation) evicting(ctx context.Context, r *root) error {
	// What cannot fit, whatever is evicted, costs nobody anything.
	if err := r.Account.Possible(w.Want, r.IsScanning()); err != nil {
		return err
	}
	var wait capacity.Wait
	defer wait.End()
	defer func() {
		if w.Taken > 0 { // nothing was booked
			w.reuseFor.removeTemp()
			r.Account.Remove(capacity.Orphans, w.Taken)
		}
	}()
	for {
		w.Behind = !w.evicts && !wait.Begun()
		r.Lock()
		noSlot := w.slot && r.Index.Len() == r.Index.Max()
		short, ok := capacity.Shortage{}, false
		if !noSlot {
			short, ok = r.Account.Reserve(w.Want)
		} else {
			short = r.Account.Short(w.Want)
		}
		scanning, err := r.Scanning(), error(nil)
		if ok {
			err = w.booked(r)
		}
		r.Unlock()
		if ok {
			return err
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		switch {
		case scanning:
			return fmt.Errorf("%w: %s is %d bytes short, and its scan may find more", ErrNoSpace, r.Path, short.Bytes)
		case !w.evicts && short.Quota > 0:
			return r.Account.QuotaError(w.Want, short.Quota)
		case !w.evicts:
			if err := w.await(ctx, r, &wait, short); err != nil {
				return fmt.Errorf("%w: %s is %d bytes short: %w", ErrNoSpace, r.Path, short.Bytes, err)
			}
		default:
			if err := w.evict(r, short, noSlot); err != nil {
				return err
			}
		}
	}
}

// booked ends a reservation whose bytes are booked. The lock is held.
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

// await waits for the background evictor to free something.
func (w *reservation) await(ctx context.Context, r *root, wait *capacity.Wait, short capacity.Shortage) error {
	if !wait.Begun() {
		r.Counted(&r.Count.Waits)
	}
	return wait.Round(ctx, r.Account, w.Want, short, r.store.cfg.EvictPatience, func() error {
		if !r.Health.Takes() || r.store.closed.Load() {
			return ErrRootOut
		}
		wake(r.evictorWake)
		return nil
	})
}

// evict evicts a part of what a reservation is short of.
func (w *reservation) evict(r *root, short capacity.Shortage, noSlot bool) error {
	bytes, tenant := short.Bytes, abi.None
	if short.Quota > 0 {
		bytes, tenant = short.Quota, w.ID
	}
	got := r.evictSome(max(bytes, 1), tenant, w.reuseFor, !w.spares)
	w.Taken += got.taken
	if got.freed > 0 || noSlot && got.entries > 0 {
		return nil
	}
	switch {
	case got.behind:
		return moves.ErrBehind
	case got.failed != nil:
		// Their bytes are still taken, and the next ones' would be.
		return fmt.Errorf("%w: %s is %d bytes short and victims' files cannot be unlinked: %w", ErrNoSpace, r.Path,
			bytes, got.failed)
	case short.Quota > 0:
		return r.Account.QuotaError(w.Want, short.Quota)
	case bytes > 0 && r.Quarantine.Shrink(bytes):
		return nil
	case noSlot:
		return fmt.Errorf("%w: all %d slots of %s are taken and no entry can be evicted", ErrNoSpace,
			r.Index.Max(), r.Path)
	}
	return fmt.Errorf("%w: %s is %d bytes short and no entry can be evicted", ErrNoSpace, r.Path, bytes)
}

// shrink evicts down to the limit: what was reserved took more than it should have.
func (r *root) shrink(ctx context.Context) {
	if r.turn.Acquire(ctx, 1) != nil {
		return
	}
	defer r.turn.Release(1)
	if err := r.custody.reserve(ctx, reservation{Want: capacity.Want{Quota: -1}, evicts: true}); err != nil {
		r.Log.Warn("root is over its capacity: nothing can be evicted", "used", r.Account.Used(),
			"capacity", r.Account.Capacity(), "error", err)
	}
}

// shrinkIfOver evicts when a file that could not be unlinked has put the root over its limit, and says whether it is
// within it.
func (r *root) shrinkIfOver() bool {
	if r.within() {
		return true
	}
	r.shrink(context.Background())
	return r.within()
}

// within says whether the root is within its limit, as far as this host keeps it.
func (r *root) within() bool { return !r.rules.evicts || r.IsScanning() || r.Account.Excess(1) <= 0 }
