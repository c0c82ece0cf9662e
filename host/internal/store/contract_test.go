package store

import (
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy/policytest"
)

// The store has other tables for the host's side of an evict policy. Its events keep the contract all the same,
// also those of a start.
func TestEventsKeepTheContract(t *testing.T) {
	w := &witness{}
	f := newFixture(t, t.TempDir(), 6, 1, func(c *Config) { c.Policies.Evict = handle(w.module()) })
	rng := rand.New(rand.NewPCG(1, 1))
	for range 3 {
		var leases []*Lease
		for i := range uint32(60) {
			from := rng.Uint64N(8)
			switch rng.IntN(3) {
			case 0:
				if err := f.put(from, 0); err != nil && !errors.Is(err, ErrResident) && !errors.Is(err, ErrNoSpace) {
					t.Fatal(err)
				}
			case 1:
				f.lookup(from).Release()
			default:
				if len(leases) < 3 {
					leases = append(leases, f.lookup(from, from+1))
				}
			}
			if i%7 == 0 {
				f.store.EndRequest(i, abi.Hints{})
			}
			if len(leases) > 2 {
				leases[0].Release()
				leases = leases[1:]
			}
		}
		for _, l := range leases {
			l.Release()
		}
		r := f.root()
		r.Lock()
		err := r.Evictor.Flush()
		r.Unlock()
		must(t, err)
		w.mu.Lock()
		events := w.events
		w.events = nil
		w.mu.Unlock()
		if len(events) < 60 {
			t.Fatalf("%d events: nothing to check", len(events))
		}
		must(t, policytest.CheckEvents(events))
		f.restart()
	}
}
