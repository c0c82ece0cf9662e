package store

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/policy"
	"github.com/kvhost/kvhost/host/policy/policytest"
)

// TestNamesAreLost has the module of a place policy fail again and again, until it is in quarantine. What it has named
// is a miss while nobody can name it, not a promise that fails; it is found again when a guest has been started for it;
// and what is new gets the built-in names.
func TestNamesAreLost(t *testing.T) {
	m, err := policy.Open(t.Context(), "fanout", policy.Options{Dir: policytest.Dir(t, "fanout")})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close(context.Background())
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, t.TempDir(), 3, 1, func(c *Config) { c.Policies.Place = handle(m) })
		defer f.store.Close()
		f.mustPut(0, 1)
		place := f.space.Class(0).Place.Policy
		lose := func() {
			for !place.Down() {
				if _, _, err := place.Path(&abi.PlaceQuery{KeyLen: 200}, nil); err == nil {
					t.Fatal("a key of 200 bytes has a path")
				}
			}
		}
		lose()
		if f.has(0) {
			t.Error("an entry is promised whose file nobody can name")
		}
		time.Sleep(3 * time.Second) // until it has the built-in name
		f.mustRead(0)
		for m.Quarantined() == nil {
			lose()
			time.Sleep(time.Minute)
		}
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
