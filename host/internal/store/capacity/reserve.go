package capacity

import (
	"context"
	"fmt"
	"time"
)

// Want is a reservation.
type Want struct {
	Bytes  int64
	Tenant uint16 // the number of whose entry it is
	ID     uint32 // the tenant, for errors
	Quota  int64  // of the tenant; negative: none
	Behind bool   // it comes after those that wait
	Taken  int64  // of Bytes: booked as orphans, as those of a file that was taken over
}

// Shortage is why a reservation does not fit.
type Shortage struct {
	Bytes int64 // too few in the root; negative: not that
	Quota int64 // over the tenant's quota; negative or 0: not that
	seen  uint64
}

// Possible says why a reservation could not fit even in an empty root, if so. Bytes of a scan that has not ended do not
// count.
func (a *Account) Possible(w Want, scanning bool) error {
	a.mu.Lock()
	all, limit := a.bounds.Capacity, a.limit()
	a.mu.Unlock()
	if w.Bytes > all {
		return fmt.Errorf("%w: %d bytes in a root of %d", ErrNoSpace, w.Bytes, all)
	}
	if w.Bytes > 0 && w.Bytes > limit && !scanning {
		return fmt.Errorf("%w: an entry of %d bytes in %s, which may take %d now", ErrNoSpace, w.Bytes, a.dir, limit)
	}
	if w.Quota >= 0 && w.Bytes > w.Quota {
		return fmt.Errorf("%w: an entry of %d bytes is over the quota of tenant %d in %s, %d bytes", ErrNoSpace, w.Bytes,
			w.ID, a.dir, w.Quota)
	}
	return nil
}

// Short is what a reservation would be short of now.
func (a *Account) Short(w Want) Shortage {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.short(w)
}

func (a *Account) short(w Want) Shortage {
	s := Shortage{Bytes: a.used + w.Bytes - w.Taken - a.limit(), Quota: a.overQuota(w), seen: a.changes}
	if w.Behind {
		s.Bytes += a.waiting
	}
	return s
}

// Reserve books the bytes for the tenant if they fit, and says otherwise what is short.
func (a *Account) Reserve(w Want) (s Shortage, ok bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if s = a.short(w); s.Bytes > 0 || s.Quota > 0 {
		return s, false
	}
	if w.Bytes > 0 {
		a.bill(w.Tenant, w.Bytes)
		a.add(Orphans, -w.Taken)
		a.check()
	}
	return s, true
}

// OverQuota says whether the tenant's quota is too small for what is wanted.
func (a *Account) OverQuota(w Want) bool {
	if w.Quota < 0 {
		return false
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.overQuota(w) > 0
}

func (a *Account) overQuota(w Want) int64 {
	if w.Quota < 0 || w.Bytes == 0 {
		return 0
	}
	return a.ownedBy(w.Tenant) + w.Bytes - w.Quota
}

// QuotaError is the error of a reservation that is over its tenant's quota.
func (a *Account) QuotaError(w Want, over int64) error {
	return fmt.Errorf("%w: tenant %d is %d bytes over its quota in %s, %d bytes, and none of its entries can be evicted",
		ErrNoSpace, w.ID, over, a.dir, w.Quota)
}

// Wait is a reservation's wait for the background evictor. The zero value waits for nothing yet.
type Wait struct {
	account *Account
	bytes   int64
	last    uint64 // the fruitless round after which it has waited enough
	ctx     context.Context
	stops   []func()
}

// Begun says whether it has waited.
func (w *Wait) Begun() bool { return w.account != nil }

// Round waits until bytes were released since a reservation was short. The wait ends with an error after patience, with
// the context, when the evictor frees nothing in a whole round, and when wake, which is to wake the evictor, has one.
func (w *Wait) Round(
	ctx context.Context, a *Account, want Want, short Shortage, patience time.Duration, wake func() error,
) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if w.account == nil {
		w.account, w.bytes = a, want.Bytes
		a.waiting += w.bytes
		a.waiters++
		w.last = a.fruitless + 2 // the round under way may have begun before
		var cancel context.CancelFunc
		w.ctx, cancel = context.WithTimeout(ctx, patience)
		awake := context.AfterFunc(w.ctx, func() {
			a.mu.Lock()
			defer a.mu.Unlock()
			a.changes++
			a.changed.Broadcast()
		})
		w.stops = []func(){func() { awake() }, cancel}
	}
	if a.fruitless >= w.last {
		return ErrEvictor
	}
	if err := w.ctx.Err(); err != nil {
		return err
	}
	if err := wake(); err != nil {
		return err
	}
	for a.changes == short.seen {
		a.changed.Wait()
	}
	return nil
}

// End ends the wait.
func (w *Wait) End() {
	if w.account == nil {
		return
	}
	w.account.mu.Lock()
	w.account.waiting -= w.bytes
	w.account.waiters--
	w.account.mu.Unlock()
	for _, stop := range w.stops {
		stop()
	}
}

// Evict is what the background evictor is to free to get down to a part of the limit, and to what waiting reservations
// need; 0 or less: nothing.
func (a *Account) Evict(low float64) int64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	limit := a.limit()
	return a.used - max(0, min(int64(low*float64(limit)), limit-a.waiting))
}

// Overcommitted is how many bytes are too few for what is in use and what waits; 0 or less: none.
func (a *Account) Overcommitted() int64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.used + a.waiting - a.limit()
}

// Round ends a round of the background evictor. Reservations give up waiting after fruitless ones.
func (a *Account) Round(fruitless bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if fruitless {
		a.fruitless++
	}
	a.changes++
	a.changed.Broadcast()
}
