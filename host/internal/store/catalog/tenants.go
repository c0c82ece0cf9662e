package catalog

import (
	"sync"
	"sync/atomic"

	"github.com/kvhost/kvhost/abi"
)

// UnknownTenant is the tenant to which bytes are billed if there are too many tenants to number, or if the tenant is not known
// yet.
const UnknownTenant = abi.None - 1

// unknownTenant is the number of UnknownTenant.
const unknownTenant = 1<<16 - 1

// Tenants numbers tenants, so that an index entry refers to one by two bytes. A number is never freed, because entries and the
// accounts of roots may use it at any time.
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

// Tenant returns the tenant with a number.
func (t *Tenants) Tenant(number uint16) uint32 {
	if number == unknownTenant {
		return UnknownTenant
	}
	return (*t.list.Load())[number]
}

// Several reports whether there is more than one tenant.
func (t *Tenants) Several() bool { return len(*t.list.Load()) > 1 }

// Has reports whether a tenant has a number.
func (t *Tenants) Has(tenant uint32) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	_, ok := t.number[tenant]
	return ok
}

// Number returns the number of a tenant. Tenants beyond the first 65,535 are treated as UnknownTenant: they share its quota, if
// it has one, and no other tenant is billed for them.
func (t *Tenants) Number(tenant uint32) uint16 {
	if list := *t.list.Load(); len(list) > 0 && list[0] == tenant {
		return 0 // most stores have a single tenant
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
	list = append(list, tenant) // in place, beyond the length that readers of the old list see
	t.list.Store(&list)
	t.number[tenant] = n
	return n
}
