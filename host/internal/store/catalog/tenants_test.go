package catalog

import "testing"

// TestTenantsBeyondTheLimit: a tenant that gets no number is nobody else.
func TestTenantsBeyondTheLimit(t *testing.T) {
	tenants := newTenants()
	for n := range uint32(unknownTenant) {
		if got := tenants.Number(n + 7); got != uint16(n) || tenants.Tenant(got) != n+7 {
			t.Fatalf("tenant %d: number %d, which is tenant %d", n+7, got, tenants.Tenant(got))
		}
	}
	for _, tenant := range []uint32{3, 1 << 20, UnknownTenant} {
		if got := tenants.Number(tenant); tenants.Tenant(got) != UnknownTenant {
			t.Errorf("tenant %d: number %d, which is tenant %d", tenant, got, tenants.Tenant(got))
		}
	}
	if got := tenants.Number(9); got != 2 {
		t.Errorf("tenant 9 has number %d now", got)
	}
}
