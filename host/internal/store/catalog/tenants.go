package catalog

import (
	"sync"
	"sync/atomic"

	"github.com/kvhost/kvhost/abi"
)

// UnknownTenant is the tenant that bytes are billed to when there are too many tenants to number, or none is known yet.
const UnknownTenant = abi.None - 1

// unknownTenant is its number.
const unknownTenant = 1<<16 - 1

// Tenants numbers tenants, so that an index entry names one in two bytes. A number is never freed, because entries and
// the accounts of roots use it for as long as they last.
type Tenants struct {
	list   atomic.Pointer[[]uint32] // read without the lock
	mu     sync.Mutex
	number map[uint32]uint16
}

func newTenants() *Tenants {
	t := &Tenants{number: map[uint32]uint16{}}
	t.list.Store(new([]uint32))
	return t
}

// Tenant is the tenant with a number.
func (t *Tenants) Tenant(number uint16) uint32 {
	if number == unknownTenant {
		return UnknownTenant
	}
	return (*t.list.Load())[number]
}

// Several says whether there is more than one.
func (t *Tenants) Several() bool { return len(*t.list.Load()) > 1 }

// Has says whether a tenant has a number.
func (t *Tenants) Has(tenant uint32) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	_, ok := t.number[tenant]
	return ok
}

// Number returns a tenant's number. Tenants beyond the first 65,535 are UnknownTenant: they share its quota, if it has
// one, and no other tenant is billed for them.
func (t *Tenants) Number(tenant uint32) uint16 {
	if list := *t.list.Load(); len(list) > 0 && list[0] == tenant {
		return 0 // a store with one tenant is the usual case
	}
	if tenant == UnknownTenant {
		return unknownTenant
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if n, ok := t.number[tenant]; ok {
		return n
	}
	list := *t.list.Load()
	if len(list) == unknownTenant {
		return unknownTenant
	}
	n := uint16(len(list))
	list = append(list, tenant) // beyond what readers of the old list see
	t.list.Store(&list)
	t.number[tenant] = n
	return n
}
