package capacity

import "fmt"

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
