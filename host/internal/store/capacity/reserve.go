package capacity

import (
	"fmt"
)

// Want is a requested reservation.
type Want struct {
	Bytes  int64
	Tenant uint16 // number of the entry's tenant
	ID     uint32 // id of the tenant, for errors
	Quota  int64  // quota of the tenant in bytes; negative if it has none
	Taken  int64  // part of Bytes that is booked as orphans, because the file was taken over from one
}

// Shortage is the reason why a reservation does not fit.
type Shortage struct {
	Bytes int64 // bytes missing in the root; none if not positive
	Quota int64 // bytes over the tenant's quota; none if not positive
}

// Possible returns an error if a reservation could not fit even into an empty root. While a scan is running, a low limit of the
// file system is ignored: the limit depends on bytes that the scan has not yet counted.
func (a *Account) Possible(w Want, scanning bool) error {
	a.mu.Lock()
	all, limit := a.bounds.Capacity, a.limit()
	a.mu.Unlock()
	if w.Bytes > all {
		return fmt.Errorf("%w: an entry of %d bytes in a root of %d", ErrNoSpace, w.Bytes, all)
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

// Short returns the shortage that a reservation would have now.
func (a *Account) Short(w Want) Shortage {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.short(w)
}

func (a *Account) short(w Want) Shortage {
	return Shortage{Bytes: a.used + w.Bytes - w.Taken - a.limit(), Quota: a.overQuota(w)}
}

// Reserve books the bytes for the tenant if they fit. Otherwise it returns the shortage and false.
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

// QuotaError returns the error for a reservation over its tenant's quota.
func (a *Account) QuotaError(w Want, over int64) error {
	return fmt.Errorf("%w: tenant %d is %d bytes over its quota in %s, %d bytes, and none of its entries can be evicted",
		ErrNoSpace, w.ID, over, a.dir, w.Quota)
}

// Quota limits the bytes of each tenant in a range. Bytes is a limit over all roots, divided by their capacities. Share is a
// part of each root. If a tenant has used up its quota, its own entries are evicted for its stores.
type Quota struct {
	First, Last uint32 // range of tenants; each has its own quota
	Bytes       int64  // either Bytes or Share is set
	Share       float64
}

// Quotas are the quotas of a host. The first that covers a tenant applies.
type Quotas []Quota

// Check returns an error if a quota is not valid.
func (list Quotas) Check() error {
	for _, q := range list {
		if q.First > q.Last || q.Bytes < 0 || q.Share < 0 || q.Share > 1 || (q.Bytes == 0) == (q.Share == 0) {
			return fmt.Errorf("a quota of %d bytes or a share of %g for tenants %d to %d: want either, and a share of at most 1", q.Bytes, q.Share, q.First, q.Last)
		}
	}
	return nil
}

// Of returns the quota of a tenant in a root with a given capacity, out of the capacity of all roots. It is negative if the
// tenant has none.
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
