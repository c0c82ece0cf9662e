package store

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/policy/policytest"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
)

// frail is lru as a module that runs out of fuel on a full batch of events and else does its work.
func frail(t *testing.T) *policy.Module {
	t.Helper()
	m := openFrail(t)
	t.Cleanup(func() { m.Close(context.Background()) })
	return m
}

func openFrail(t *testing.T) *policy.Module {
	t.Helper()
	m, err := policy.Open(t.Context(), "lru", policy.Options{
		Dir: policytest.Dir(t, "lru"), Cache: policytest.Cache(t), Fuel: sandbox.Fuel{Call: 50_000, Record: 1},
	})
	must(t, err)
	return m
}

// fail makes the module of r fault with a batch of lookups.
func (f *fixture) fail(n uint64, request *uint32) {
	f.Helper()
	before := f.store.Stats().Roots[0].EvictFaults
	for f.store.Stats().Roots[0].EvictFaults == before {
		*request++
		l, err := f.store.Lookup(LookupRequest{Namespace: f.space, Keys: keys(n), Request: *request})
		must(f, err)
		l.Release()
	}
}

// await waits until the module, or the built-in policy, is the one that answers.
func (f *fixture) await(builtin bool) {
	f.Helper()
	for range 2000 {
		if f.store.Stats().Roots[0].Evict.Builtin == builtin {
			return
		}
		time.Sleep(10 * time.Millisecond) // of a bubble's clock
	}
	f.Fatalf("built-in is not %v: %+v", builtin, f.store.Stats().Roots[0].Evict)
}

// TestEvictComesBack has a module that faults: the built-in policy continues from its state, and so does the module
// after it.
func TestEvictComesBack(t *testing.T) {
	m := frail(t)
	synctest.Test(t, func(t *testing.T) { testEvictComesBack(t, m) })
}

func testEvictComesBack(t *testing.T, m *policy.Module) {
	f := newFixture(t, t.TempDir(), 4, 1, func(c *Config) { c.Policies.Evict = handle(m) })
	f.mustPut(0, 1, 2, 3)
	var request uint32
	f.fail(0, &request)
	if st := f.store.Stats().Roots[0]; !st.Evict.Builtin || st.EvictFaults != 1 {
		t.Errorf("%+v", st)
	}
	f.mustPut(5)
	if f.has(1) || !f.has(0) || !f.has(5) {
		t.Error("the built-in policy did not evict the least recently touched")
	}
	f.await(false)
	if st := f.store.Stats().Roots[0]; st.Evict.Digest != m.Digest() || m.Quarantined() != nil {
		t.Errorf("%+v, %v", st, m.Quarantined())
	}
	f.lookup(2).Release()
	f.mustPut(6)
	if f.has(3) || !f.has(2) || !f.has(0) {
		t.Error("the module that came back did not evict the least recently touched")
	}
	f.checkUsed()
}

// TestEvictInQuarantine has it fault until it is given up.
func TestEvictInQuarantine(t *testing.T) {
	m := frail(t)
	synctest.Test(t, func(t *testing.T) { testEvictInQuarantine(t, m) })
}

func testEvictInQuarantine(t *testing.T, m *policy.Module) {
	f := newFixture(t, t.TempDir(), 4, 1, func(c *Config) { c.Policies.Evict = handle(m) })
	f.mustPut(0, 1, 2, 3)
	var request uint32
	for m.Quarantined() == nil {
		f.await(false)
		f.fail(0, &request)
	}
	if st := f.store.Stats().Roots[0]; !st.Evict.Builtin || st.EvictFaults < 2 {
		t.Errorf("%+v", st)
	}
	f.mustPut(5)
	f.checkUsed()
}
