package sim

import (
	"context"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/policy/policytest"
)

// A large and hot root makes every ask as expensive as it can be: all entries used again and again, all pinned but the
// last, or all of another tenant. A policy may then name fewer victims, but must not run out of fuel.
func TestHardQuestionsStayWithinFuel(t *testing.T) {
	const slots = 100_000
	ctx := context.Background()
	names := []string{"arc", "clock", "gdsf", "lfu", "lirs", "s3fifo", "sieve", "twoq", "wtinylfu"}
	dir := policytest.Dir(t, names...)
	all := abi.Ask{Bytes: 1 << 40, MaxVictims: 1024, Tenant: abi.None}
	for _, name := range names {
		t.Run(name, func(t *testing.T) {
			m, err := policy.Open(ctx, name, policy.Options{Dir: dir, Cache: policytest.Cache(t)})
			if err != nil {
				t.Fatal(err)
			}
			defer m.Close(ctx)
			e, err := m.NewEvict(ctx, policy.EvictOptions{MaxSlots: slots, Capacity: slots * abi.SizeUnit, Seed: 1})
			if err != nil {
				t.Fatal(err)
			}
			defer e.Close()
			var now uint64
			each := func(op abi.Op, from uint32) {
				t.Helper()
				for s := from; s < slots; s++ {
					now += 1e6
					err := e.Event(abi.Event{
						Op: op, Slot: s, Parent: abi.None, Key: fingerprint(uint64(s)), Size: 1, Request: s / 100,
						Tenant: 1, Depth: s % 100, Time: now,
					})
					if err != nil {
						t.Fatalf("%s: %v", op, err)
					}
				}
			}
			ask := func(a abi.Ask, atLeast int) {
				t.Helper()
				if err := e.Flush(); err != nil {
					t.Fatal(err)
				}
				before := e.Stats().Fuel
				n, err := e.Victims(a, make([]uint32, a.MaxVictims))
				if err != nil {
					t.Fatal(err)
				}
				t.Logf("%d victims for %d fuel", n, e.Stats().Fuel-before)
				if n < atLeast {
					t.Errorf("named %d, want %d at least", n, atLeast)
				}
			}
			spent := func(what string) {
				t.Helper()
				if err := e.Flush(); err != nil {
					t.Fatal(err)
				}
				t.Logf("%d fuel so far, after %s", e.Stats().Fuel, what)
			}
			each(abi.OpInsert, 0)
			spent("inserts")
			for range 4 {
				each(abi.OpTouch, 0)
			}
			spent("touches")
			ask(abi.Ask{Bytes: 1, MaxVictims: 1, Tenant: abi.None}, 1)
			ask(all, 50)
			ask(abi.Ask{Bytes: 1, MaxVictims: 1, Tenant: 2}, 0)
			each(abi.OpPin, 0)
			ask(all, 0)
			each(abi.OpUnpin, 0)
			ask(all, 50)
			each(abi.OpRemove, 1)
			ask(all, 1)
		})
	}
}
