package store

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/policy"
	"github.com/kvhost/kvhost/host/policy/policytest"
	"github.com/kvhost/kvhost/plugins/fanout"
)

// The pieces of these tests.
const hostilePieces = 40

// hits stores pieces again that are not there, reads all of them, and counts what a lookup grants and a load delivers.
func (f *fixture) hits() (n int) {
	for key := range uint64(hostilePieces) {
		if !f.has(key) {
			continue
		}
		l := f.lookup(key)
		if _, err := read(l, 0, 0); l.Hits() == 1 && err == nil {
			n++
		}
		l.Release()
	}
	return n
}

// eventually waits for a condition in a bubble.
func eventually(t *testing.T, within time.Duration, holds func() bool) {
	t.Helper()
	for deadline := time.Now().Add(within); !holds(); time.Sleep(time.Second) {
		if time.Now().After(deadline) {
			t.Fatalf("it does not hold after %v", within)
		}
	}
}

// What a place policy named stays there when the policy is in quarantine for good: its pieces get the built-in names.
func TestQuarantinedPlacePolicyLosesNoPiece(t *testing.T) {
	for _, widths := range []string{"2/1", "1/1"} { // the built-in names, and others
		t.Run(widths, func(t *testing.T) { testQuarantinedPlacePolicy(t, widths) })
	}
}

func testQuarantinedPlacePolicy(t *testing.T, widths string) {
	m, err := policy.Open(t.Context(), "fanout", policy.Options{Dir: policytest.Dir(t, "fanout"), Cache: policytest.Cache(t)})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close(context.Background())
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, t.TempDir(), 2*hostilePieces, 2, func(c *Config) {
			h := policy.NewHandle(m, "", policy.Config{fanout.ConfigWidths: widths}, func(*policy.Module, error) {})
			c.Policies.Place, c.Now = h.Acquire(), time.Now
		})
		defer f.store.Close()
		for key := range uint64(hostilePieces) {
			f.mustPut(key)
		}
		place := f.space.Class(0).Place.Policy
		fail := func() { place.Path(&abi.PlaceQuery{KeyLen: 200}, nil) } // no key has 200 bytes
		for m.Quarantined() == nil {
			fail()
			time.Sleep(time.Minute)
		}
		fail() // it is down now, and the next time, and so on
		eventually(t, time.Minute, func() bool { fail(); return f.hits() == hostilePieces })
		for key := range uint64(hostilePieces) {
			f.mustRead(key)
		}
		before := place.Stats().Calls
		f.mustPut(hostilePieces)
		f.mustRead(hostilePieces)
		if calls := place.Stats().Calls - before; calls != 0 {
			t.Errorf("a policy in quarantine is asked %d times about pieces that it does not name", calls)
		}
		f.checkUsed()
		f.restart()
		for key := range uint64(hostilePieces + 1) {
			f.mustRead(key)
		}
		f.checkUsed()
	})
}

// A policy that names a piece otherwise each time, or after a while, costs no piece.
func TestImpurePlacePolicyLosesNoPiece(t *testing.T) {
	for name, pure := range map[string]func(asked int64) bool{
		"each time": func(int64) bool { return false }, "after a while": func(asked int64) bool { return asked < 200 },
		"from then on": nil,
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var asked atomic.Int64
				var moved atomic.Bool
				names := linkedPlacer(func(q *abi.PlaceQuery, dst []byte) []byte {
					n := asked.Add(1)
					if pure != nil && pure(n) || pure == nil && !moved.Load() {
						n = 0
					} else if pure == nil {
						n = 1 // another name, but always the same: what facts about the roots can do
					}
					return fmt.Appendf(dst, "at%d/%x_%d", n, q.Key[:8], q.Rank)
				})
				f := newFixture(t, t.TempDir(), 2*hostilePieces, 1, func(c *Config) {
					c.Policies.Place, c.Now = names.use("impure"), time.Now
				})
				defer f.store.Close()
				for key := range uint64(hostilePieces) {
					f.mustPut(key)
				}
				moved.Store(true)
				asked.Add(1000)
				f.hits() // some loads fail, and show what the policy is
				eventually(t, 2*time.Minute, func() bool { return f.hits() == hostilePieces })
				for key := range uint64(hostilePieces) {
					f.mustRead(key)
				}
				if !f.space.Class(0).Place.Policy.Quarantined() {
					t.Error("it still names pieces")
				}
				eventually(t, 10*time.Minute, func() bool { return len(f.files()) == hostilePieces })
				f.checkUsed()
			})
		})
	}
}

// Names that lead through other pieces, or are directories of them, cost nothing: such pieces get the built-in names.
func TestNamesThroughOtherPieces(t *testing.T) {
	for name, path := range map[string]func(q *abi.PlaceQuery, dst []byte) []byte{
		"a directory of another": func(q *abi.PlaceQuery, dst []byte) []byte {
			if q.Key[7]%2 == 0 {
				return fmt.Appendf(dst, "a/%d/%x", q.Key[0]%4, q.Key[:7])
			}
			return fmt.Appendf(dst, "a/%d", q.Key[0]%4)
		},
		"through another": func(q *abi.PlaceQuery, dst []byte) []byte {
			if k := testKey(0); q.Key == k {
				return append(dst, "a"...)
			}
			return fmt.Appendf(dst, "a/%x", q.Key[:7])
		},
		"all the same": func(_ *abi.PlaceQuery, dst []byte) []byte { return append(dst, "a"...) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFixture(t, t.TempDir(), 2*hostilePieces, 1, func(c *Config) {
					c.Policies.Place, c.Now = linkedPlacer(path).use("clash"), time.Now
				})
				defer f.store.Close()
				for key := range uint64(hostilePieces) {
					f.mustPut(key)
				}
				if got := f.hits(); got != hostilePieces {
					t.Errorf("%d hits", got)
				}
				place := f.space.Class(0).Place.Policy
				if !place.Quarantined() {
					t.Error("it still names pieces")
				}
				eventually(t, time.Minute, func() bool { return !f.store.roots[0].recovery.Named(f.space.Class(0).Place) })
				// From then on nobody looks again.
				n := &f.store.roots[0].renaming
				eventually(t, time.Minute, func() bool { _, ok := n.settled.Load(f.space.Class(0).Place); return ok })
				if got := f.hits(); got != hostilePieces {
					t.Errorf("%d hits under the built-in names", got)
				}
				f.checkUsed()
			})
		})
	}
}
