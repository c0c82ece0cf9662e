package store

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/policy"
	"github.com/kvhost/kvhost/host/policy/policytest"
	"github.com/kvhost/kvhost/host/policy/sandbox"
)

// frail is lru as a module that runs out of fuel on a full batch of events and else does its work.
func frail(t *testing.T) *policy.Module {
	t.Helper()
	m, err := policy.Open(t.Context(), "lru", policy.Options{Dir: policytest.Dir(t, "lru"), Fuel: sandbox.Fuel{Call: 50_000, Record: 1}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close(context.Background()) })
	return m
}

// fail makes the module of r fault with a batch of lookups.
func (f *fixture) fail(n uint64, request *uint32) {
	f.Helper()
	before := f.store.Stats().Roots[0].EvictFaults
	for f.store.Stats().Roots[0].EvictFaults == before {
		*request++
		l, err := f.store.Lookup(LookupRequest{Space: f.space, Keys: keys(n), Request: *request})
		if err != nil {
			f.Fatal(err)
		}
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
		time.Sleep(10 * time.Millisecond)
	}
	f.Fatalf("built-in is not %v: %+v", builtin, f.store.Stats().Roots[0].Evict)
}

// TestEvictComesBack has a module that faults: the built-in policy goes on where it was, and so does the module after it.
func TestEvictComesBack(t *testing.T) {
	m := frail(t)
	f := newFixture(t, t.TempDir(), 4, 1, func(c *Config) { c.Policies.Evict.Module = m })
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
	f := newFixture(t, t.TempDir(), 4, 1, func(c *Config) { c.Policies.Evict.Module = m })
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

// TestSuccession changes the entries at random while a policy is told of them. It must then know exactly what is there:
// every victim that it names, until it has no more, is one that can go, and all go.
func TestSuccession(t *testing.T) {
	const entries = 64
	for seed := range uint64(8) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			f := newFixture(t, t.TempDir(), entries, 1)
			r := f.store.roots[0]
			rng := rand.New(rand.NewPCG(seed, 3))
			for n := range uint64(entries) {
				f.mustPut(n)
			}
			w := &witness{}
			next, err := r.newEvict(t.Context(), f.store.bind(abi.RoleEvict, Use{Module: w.module()}), policy.State{})
			if err != nil {
				t.Fatal(err)
			}
			h := &successor{evict: next}
			r.mu.Lock()
			r.next = h
			r.mu.Unlock()
			order := r.snapshot()
			for len(order) > 0 {
				for range rng.IntN(4) {
					if n := rng.Uint64N(2 * entries); f.has(n) {
						f.lookup(n).Release()
					} else {
						f.mustPut(n)
					}
				}
				r.mu.Lock()
				if m := order[0]; r.stands(m.mark) && !h.knows(m.slot) {
					h.announce(r, m.slot, m.print)
				}
				r.mu.Unlock()
				order = order[1:]
			}
			r.mu.Lock()
			defer r.mu.Unlock()
			r.next = nil
			if err := next.Flush(); err != nil || h.err != nil {
				t.Fatal(err, h.err)
			}
			want := r.x.ByLastTouch()
			got := make([]uint32, 2*entries)
			n := w.Policy.Victims(abi.Ask{Bytes: 1 << 60, MaxVictims: 2 * entries, Tenant: abi.None}, got)
			if fmt.Sprint(got[:n]) != fmt.Sprint(want) {
				t.Errorf("it would evict\n%v, by last touch it is\n%v", got[:n], want)
			}
		})
	}
}
