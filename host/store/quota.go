package store

import "fmt"

// Quota bounds what the entries of one tenant may take. Bytes are over all roots, and each root has the part of them that
// it has of all capacity; a share is of each root. When a tenant's quota is used up, its own entries go for its stores.
type Quota struct {
	First, Last uint32 // tenants that it is for, each with a quota of its own
	Bytes       int64  // or
	Share       float64
}

func checkQuotas(list []Quota) error {
	for _, q := range list {
		if q.First > q.Last || q.Bytes < 0 || q.Share < 0 || q.Share > 1 || (q.Bytes == 0) == (q.Share == 0) {
			return fmt.Errorf("%w: a quota of %d bytes or a share of %g for tenants %d to %d", ErrConfig, q.Bytes, q.Share, q.First, q.Last)
		}
	}
	return nil
}

// quota is a tenant's in one root.
type quota struct {
	tenant uint32
	index  uint16
	bytes  int64 // none where there is no quota
}

// quota is the tenant's. mu need not be held.
func (r *root) quota(tenant uint16) quota {
	q := quota{index: tenant, bytes: -1}
	s := r.store
	if len(s.cfg.Quotas) == 0 {
		return q
	}
	q.tenant = s.spaces.tenantOf(tenant)
	for _, c := range s.cfg.Quotas {
		if q.tenant < c.First || q.tenant > c.Last {
			continue
		}
		if q.bytes = int64(c.Share * float64(r.cfg.Capacity)); c.Bytes > 0 {
			var all int64
			for _, o := range s.cfg.Roots {
				all += o.Capacity
			}
			q.bytes = int64(float64(c.Bytes) / float64(all) * float64(r.cfg.Capacity))
		}
		break
	}
	return q
}

// over is how many bytes too many the tenant would have with more on top. mu is held.
func (q quota) over(r *root, more int64) int64 {
	if q.bytes < 0 || more == 0 {
		return 0
	}
	return r.ownedBy(q.index) + more - q.bytes
}

func (q quota) error(r *root, over int64) error {
	return fmt.Errorf("%w: %d bytes are over the quota of tenant %d in %s, %d bytes, and none of its entries can go", ErrNoSpace, over, q.tenant, r.dir, q.bytes)
}

// overQuota says whether the tenant's quota is too small for more. mu is not held.
func (r *root) overQuota(tenant uint16, more int64) bool {
	q := r.quota(tenant)
	if q.bytes < 0 {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return q.over(r, more) > 0
}

// mu is held in what follows.

func (r *root) ownedBy(tenant uint16) int64 {
	if int(tenant) >= len(r.owned) {
		return 0
	}
	return r.owned[tenant]
}

// bill enters a change of an entry's bytes into its tenant's account.
func (r *root) bill(slot uint32, by int64) {
	if len(r.store.cfg.Quotas) == 0 {
		return
	}
	tenant := int(r.x.Owner(slot).Tenant)
	for tenant >= len(r.owned) {
		r.owned = append(r.owned, 0)
	}
	r.owned[tenant] += by
}
