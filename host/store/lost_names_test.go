package store

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/policy"
	"github.com/kvhost/kvhost/host/policy/policytest"
	"github.com/kvhost/kvhost/staging"
)

// TestNamesAreLost has the module of a place policy fail until it is in quarantine. What it has named is a miss while
// nobody can name it, not a promise that fails; it is found again when it has the built-in name; and what is new gets
// that name at once.
func TestNamesAreLost(t *testing.T) {
	m, err := policy.Open(t.Context(), "fanout", policy.Options{Dir: policytest.Dir(t, "fanout"), Cache: policytest.Cache(t)})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close(context.Background())
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		// The quarantine begins to rename the pieces, which must wait until the entries have been looked up.
		g := &gated{FS: staging.OS(), dir: dir, gate: make(chan struct{})}
		f := newFixture(t, dir, 3, 1, func(c *Config) { c.Policies.Place, c.FS, c.IOTimeout = handle(m), g, time.Hour })
		defer f.store.Close()
		f.mustPut(0, 1)
		for place := f.space.Class(0).Place.Policy; !place.Down(); {
			if _, _, err := place.Path(&abi.PlaceQuery{KeyLen: 200}, nil); err == nil {
				t.Fatal("a key of 200 bytes has a path")
			}
		}
		if m.Quarantined() == nil {
			t.Error("it is not in quarantine")
		}
		synctest.Wait() // the walk over the files is at the gate
		if f.has(0) {
			t.Error("an entry is promised whose file nobody can name")
		}
		close(g.gate)
		time.Sleep(3 * time.Second) // in which the pieces get their built-in names
		f.mustRead(0)
		f.mustRead(1)
		f.mustPut(2)
		f.mustRead(2)
		f.mustPut(3, 4, 5) // the first two go, by the names that they have
		if f.has(0) || f.has(1) || !f.has(5) {
			t.Error("entries that the policy named are not evicted")
		}
		f.checkUsed()
	})
}
