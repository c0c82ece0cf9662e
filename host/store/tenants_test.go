package store

import (
	"testing"
	"time"

	"github.com/kvhost/kvhost/host/store/catalog"
	"github.com/kvhost/kvhost/host/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
)

// TestMoreTenantsThanNumbers finds and stores pieces of tenants that get no number. Nobody else may be billed for them.
func TestMoreTenantsThanNumbers(t *testing.T) {
	f := newFixture(t, t.TempDir(), 10, 1)
	store := func(n uint64, tenant uint32) {
		t.Helper()
		q := f.request(n, n, 0)
		q.Tenant = tenant
		p, err := f.store.Put(t.Context(), q)
		if err != nil {
			t.Fatal(err)
		}
		if err := write(p); err != nil {
			t.Fatal(err)
		}
		if err := p.Publish(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	store(0, 1<<20)
	if err := f.store.Close(); err != nil {
		t.Fatal(err)
	}
	dir := f.cfg.Roots[0].Path
	put(t, dir+"/"+pieceformat.CheckpointFile, []byte("no checkpoint"))
	used, _ := usage(t, dir)
	g := &gated{FS: staging.OS(), dir: dir, used: used, gate: make(chan struct{})}
	f.cfg.FS, f.cfg.ScanWait, f.cfg.IOTimeout = g, -1, time.Hour
	f.open()
	for tenant := range uint32(1<<16 - 1) {
		f.store.catalog.Tenants.Number(tenant)
	}
	close(g.gate)
	<-f.store.ScanDone()
	store(1, 1<<20+1)
	r := f.store.roots[0]
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
