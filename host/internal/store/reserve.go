package store

import (
	"context"
	"fmt"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/store/capacity"
	"github.com/kvhost/kvhost/host/internal/store/moves"
)

// reservation is what a put needs of a root.
type reservation struct {
	capacity.Want
	slot     bool         // a slot, too
	spares   bool         // it does not evict what has no copy in the next level yet
	reuseFor *Put         // it may get a victim's file; nil: nobody
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

// reserve implements [kind]: it evicts to make room. The caller holds the turn.
func (c *ownRoot) reserve(ctx context.Context, w reservation) error {
	r := c.r
	// What cannot fit, whatever is evicted, costs nobody anything.
	if err := r.Account.Possible(w.Want, r.IsScanning()); err != nil {
		return err
	}
	defer func() {
		if w.Taken > 0 { // nothing was booked
			w.reuseFor.removeTemp()
			r.Account.Remove(capacity.Orphans, w.Taken)
		}
	}()
	for {
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
		if scanning {
			return fmt.Errorf("%w: %s is %d bytes short, and its scan may find more", ErrNoSpace, r.Path, short.Bytes)
		}
		if err := c.evict(&w, short, noSlot); err != nil {
			return err
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

// evict evicts a part of what a reservation is short of.
func (c *ownRoot) evict(w *reservation, short capacity.Shortage, noSlot bool) error {
	r := c.r
	bytes, tenant := short.Bytes, abi.None
	if short.Quota > 0 {
		bytes, tenant = short.Quota, w.ID
	}
	got := c.evictSome(max(bytes, 1), tenant, w.reuseFor, !w.spares)
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

// evictDown evicts down to the limit: what was reserved took more than it should have.
func (c *ownRoot) evictDown(ctx context.Context) {
	if c.evicting.Acquire(ctx, 1) != nil {
		return
	}
	defer c.endTurn()
	if err := c.reserve(ctx, reservation{Want: capacity.Want{Quota: -1}}); err != nil {
		c.r.Log.Warn("root is over its capacity: nothing can be evicted", "used", c.r.Account.Figures().Used,
			"capacity", c.r.Account.Figures().Capacity, "error", err)
	}
}

// shrink implements [kind]: a file that could not be unlinked, or a file system that others fill, puts a root over its
// limit.
func (c *ownRoot) shrink(ctx context.Context) bool {
	if c.within() {
		return true
	}
	c.evictDown(ctx)
	return c.within()
}

func (c *ownRoot) within() bool { return c.r.IsScanning() || c.r.Account.Excess(1) <= 0 }

// turn implements [kind]: one reservation at a time evicts.
func (c *ownRoot) turn(ctx context.Context) error { return c.evicting.Acquire(ctx, 1) }

func (c *ownRoot) endTurn() { c.evicting.Release(1) }

func (c *ownRoot) grew() { c.leaving.Wake() }
