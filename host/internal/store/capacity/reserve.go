package capacity

import (
	"fmt"
)

// Want is a reservation.
type Want struct {
	Bytes  int64
	Tenant uint16 // the number of the entry's tenant
	ID     uint32 // the tenant, for errors
	Quota  int64  // of the tenant; negative: none
	Taken  int64  // of Bytes: booked as orphans, as those of a file that was taken over
}

// Shortage is why a reservation does not fit.
type Shortage struct {
	Bytes int64 // too few in the root; negative: not that
	Quota int64 // over the tenant's quota; negative or 0: not that
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
	if w.Bytes > limit && !scanning {
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
	return Shortage{Bytes: a.used + w.Bytes - w.Taken - a.limit(), Quota: a.overQuota(w)}
}

// Reserve books the bytes for the tenant if they fit, and says otherwise what is short.
func (a *Account) Reserve(w Want) (s Shortage, ok bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if s = a.short(w); s.Bytes > 0 || s.Quota > 0 {
		return s, false
	}
	a.bill(w.Tenant, w.Bytes)
	a.add(Orphans, -w.Taken)
	a.check()
	return s, true
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

// Quota bounds what the entries of one tenant may take. Bytes are over all roots, and each root has the part of them
// that it has of all capacity; a share is of each root. When a tenant's quota is used up, its own entries are evicted
// for its stores.
type Quota struct {
	First, Last uint32 // tenants that it is for; each has its own quota
	Bytes       int64  // or
	Share       float64
}

// Quotas are those of a host. The first that fits a tenant is the tenant's.
type Quotas []Quota

// Check says what is wrong with them.
func (list Quotas) Check() error {
	for _, q := range list {
		if q.First > q.Last || q.Bytes < 0 || q.Share < 0 || q.Share > 1 || (q.Bytes == 0) == (q.Share == 0) {
			return fmt.Errorf("a quota of %d bytes or a share of %g for tenants %d to %d", q.Bytes, q.Share, q.First, q.Last)
		}
	}
	return nil
}

// Of is a tenant's quota in a root of some of all capacity; negative where there is none.
func (list Quotas) Of(tenant uint32, capacity, all int64) int64 {
	for _, q := range list {
		if tenant < q.First || tenant > q.Last {
			continue
		}
		if q.Bytes > 0 {
			return int64(float64(q.Bytes) / float64(all) * float64(capacity))
		}
		return int64(q.Share * float64(capacity))
	}
	return -1
}
