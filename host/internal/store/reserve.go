package store

import (
	"context"
	"fmt"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/store/capacity"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/internal/store/moves"
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

// reserve implements [kind]: it evicts to make room. The caller holds the turn.
func (c *ownRoot) reserve(ctx context.Context, w reservation) error {
	r := c.r
	// What cannot fit, whatever is evicted, costs no entry.
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

// evict evicts a part of what a reservation is short of.
func (c *ownRoot) evict(w *reservation, short capacity.Shortage, noSlot bool) error {
	r := c.r
	bytes, tenant := short.Bytes, abi.None
	if short.Quota > 0 {
		bytes, tenant = short.Quota, w.ID
	}
	got := c.evictSome(max(bytes, 1), tenant, w.reuseFor, w.spares)
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
	if c.evicting.Take(ctx, abi.None) != nil {
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

func (c *ownRoot) within() bool { return c.r.IsScanning() || c.r.Account.Excess(1) <= c.r.twice.Load() }

// turn implements [kind]: one reservation at a time evicts, and tenants take turns.
func (c *ownRoot) turn(ctx context.Context, tenant uint32) error { return c.evicting.Take(ctx, tenant) }

func (c *ownRoot) endTurn() { c.evicting.Give() }

func (c *ownRoot) grew() { c.leaving.Wake() }

// evicted is what came of a round of eviction.
type evicted struct {
	entries int
	freed   int64 // bytes; an entry with files that could not be unlinked frees none
	taken   int64 // bytes of the file that was left to a put, booked as an orphan's
	failed  error // why a file could not be unlinked
	behind  bool  // the rest has no copy in the next level yet
}

// evictSome evicts entries that the policy names, up to the bytes wanted. The caller holds the turn. reuseFor may get one
// of the files instead. Only entries of the tenant are evicted, if one is named. Where there is a next level, what has no copy
// there and so many hits as spares says stays, unless that is 0.
func (c *ownRoot) evictSome(bytes int64, tenant uint32, reuseFor *Put, spares uint32) (got evicted) {
	r := c.r
	r.Lock()
	list, behind := c.leaving.Evict(c.victims[:0], bytes, tenant, spares)
	got.behind = behind
	c.victims = list
	r.Unlock()
	if len(list) == 0 {
		return got
	}
	var left int64
	offered := reuseFor != nil && reuseFor.temp == ""
	for i := range list {
		v := &list[i]
		n, stays, err := c.unlinkVictim(v, c.offerFile(v, reuseFor))
		if left += n; err != nil && got.failed == nil {
			got.failed = err
		}
		if stays {
			r.Lock()
			r.Revive(v)
			r.Unlock()
			v.Slot = index.None
		}
	}
	r.Lock()
	defer r.Unlock()
	for i := range list {
		if list[i].Slot == index.None {
			continue
		}
		got.entries++
		got.freed += r.Index.Bytes(list[i].Slot)
		r.FinishEvict(&list[i])
	}
	r.Count.Evictions += uint64(got.entries)
	if r.offers() {
		r.level.replaced(got.freed)
	}
	if offered && reuseFor.temp != "" { // the file is there before the put's bytes are reserved
		got.taken = reuseFor.class.FileBytes()
		r.Account.Add(capacity.Orphans, got.taken)
	}
	got.freed = max(0, got.freed-left)
	return got
}

// drop removes an entry at once that is not, or no longer, what the index says. keep names the ranks of files that the caller
// removes. The caller does not hold the lock.
func (r *root) drop(m entries.Mark, keep uint64) {
	r.Evict(m, func(v *entries.Eviction) { _, _ = r.kind.unlink(v, v.Pieces&^keep) }) // it logs what fails, and retries
}

// dropDamaged removes an entry because of one rank's file, which goes into quarantine.
func (r *root) dropDamaged(m entries.Mark, rank uint32, name string, cause error) {
	r.Evict(m, func(v *entries.Eviction) {
		r.Counted(&r.Count.Damaged)
		r.kind.unlinkDamaged(v, rank, name, cause)
	})
}
