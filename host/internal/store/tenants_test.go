package store

import (
	"testing"

	"github.com/kvhost/kvhost/host/internal/store/catalog"
)

// TestMoreTenantsThanNumbers finds and stores pieces of tenants that get no number. Nobody else may be billed for them.
func TestMoreTenantsThanNumbers(t *testing.T) {
	f := newFixture(t, t.TempDir(), 10, 1)
	store := func(n uint64, tenant uint32) {
		t.Helper()
		q := f.request(n, n, 0)
		q.Tenant = tenant
		p, err := f.store.Put(t.Context(), q)
		must(t, err)
		must(t, write(p))
		must(t, p.Publish(t.Context()))
	}
	store(0, 1<<20)
	g := f.reopenGated()
	for tenant := range uint32(1<<16 - 1) {
		f.store.catalog.Tenants.Number(tenant)
	}
	close(g.gate)
	<-f.store.ScanDone()
	store(1, 1<<20+1)
	r := f.root()
	for n := range uint64(2) {
		slot := f.markOf(n).Slot
		r.Lock()
		tenant := r.TenantOf(slot)
		r.Unlock()
		if tenant != catalog.UnknownTenant {
			t.Errorf("key %d is billed to tenant %d", n, tenant)
		}
	}
	f.checkUsed()
}
