package store

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/internal/testkit/policytest"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/plugins/lru"
)

// oneByOne is lru when it may not name victims before they are needed.
func oneByOne() *policy.Module {
	return policy.NativeModule("lru", []abi.Role{abi.RoleEvict}, func(i guest.Info) (any, error) { return lru.New(i) })
}

// twin is a store without files that is told what the others are told.
type twin struct {
	*fixture
	root    *root
	leases  []*Lease
	flights []*Put
}

func newTwin(t *testing.T, evict *policy.Module) *twin {
	f := indexOnly(t, 60, 32, func(c *Config) {
		c.Policies.Evict, c.Now = handle(evict), fakeClock()
		c.Quotas = []Quota{{First: 1, Last: 1, Share: 0.3}}
	})
	f.unlinkVictims()
	r := f.root()
	r.FS = fileless{r.FS}
	return &twin{fixture: f, root: r}
}

// resident lists the entries that are there, oldest touch first.
func (w *twin) resident() (list []kv.Key) {
	w.root.Lock()
	defer w.root.Unlock()
	for _, slot := range w.root.Index.ByLastTouch() {
		list = append(list, w.root.Index.Key(slot))
	}
	return list
}

func (w *twin) begin(key, group, tenant, request uint32) string {
	p, err := w.store.Put(context.Background(), PutRequest{
		Namespace: w.space, Group: group, Key: hashKey(uint64(key), 32), Tenant: tenant, Request: request,
	})
	if err == nil {
		w.flights = append(w.flights, p)
	}
	for _, known := range []error{ErrResident, ErrNoSpace} {
		if errors.Is(err, known) {
			return known.Error()
		}
	}
	return fmt.Sprint(err)
}

// finish ends a put: its entry is resident then, or goes with it.
func (w *twin) finish(i int, well bool) {
	p := w.flights[i]
	w.flights = slices.Delete(w.flights, i, i+1)
	if !well {
		p.Abort(errors.New("only tried"))
		return
	}
	w.root.Lock()
	if !w.root.Index.At(p.mark.Slot).Is(index.Evicting) {
		w.root.Index.SetPieces(p.mark.Slot, 1)
	}
	w.root.Unlock()
	p.end()
}

func (w *twin) drop(key kv.Key) {
	fp := kv.Fingerprint(w.space.Digest, 0, key)
	w.root.Lock()
	slot := w.root.Index.FindFingerprint(fp)
	w.root.Unlock()
	if slot != index.None {
		w.root.drop(entries.Mark{Slot: slot, Fingerprint: fp})
	}
}

// TestForetoldVictimsAreThoseNamedOneByOne has lru natively, which may not name victims ahead, beside itself where it
// may, natively and in wasm: after each of many random steps the same entries are resident, in one order.
func TestForetoldVictimsAreThoseNamedOneByOne(t *testing.T) {
	testenv.Slow(t)
	compareForetold(t, func() []*twin {
		return []*twin{newTwin(t, nil), newTwin(t, use(t, "lru", nil, nil).Module)}
	})
}

// TestForetoldVictimsInC is the same with recency, a policy in C.
func TestForetoldVictimsInC(t *testing.T) {
	testenv.Slow(t)
	module := policytest.Example(t, "recency")
	compareForetold(t, func() []*twin { return []*twin{newTwin(t, use(t, module, nil, nil).Module)} })
}

func compareForetold(t *testing.T, others func() []*twin) {
	for seed := range uint64(6) {
		twins := append([]*twin{newTwin(t, oneByOne())}, others()...)
		rng := rand.New(rand.NewPCG(seed, 99))
		keys := 90 + 60*uint32(seed)
		for step := range 4000 {
			first := twins[0]
			what, of, key, group := rng.IntN(20), rng.IntN(1<<20), rng.Uint32N(keys), rng.Uint32N(8)/7
			tenant, request := rng.Uint32N(3), 1+rng.Uint32N(4)
			flight, lease := of%max(1, len(first.flights)), of%max(1, len(first.leases))
			flying, leased := len(first.flights) > 0, len(first.leases) > 0
			var said []string
			for _, w := range twins {
				switch {
				case what < 8:
					said = append(said, w.begin(key, group, tenant, request))
				case what < 13 && flying:
					w.finish(flight, what < 12)
				case what < 16:
					l, err := w.store.Lookup(LookupRequest{Namespace: w.space, Group: group, Request: request, Keys: []kv.Key{
						hashKey(uint64(key), 32), hashKey(uint64((key+1)%keys), 32),
					}})
					must(t, err)
					said = append(said, fmt.Sprint(l.Hits()))
					w.leases = append(w.leases, l)
				case what < 18 && leased:
					w.leases[lease].Release()
					w.leases = slices.Delete(w.leases, lease, lease+1)
				case what == 18:
					w.drop(hashKey(uint64(key), 32))
				case of%8 == 0:
					w.store.EndRequest(request, abi.Hints{})
				}
			}
			want := first.resident()
			for i, w := range twins[1:] {
				if got := w.resident(); !slices.Equal(got, want) || len(said) > 0 && said[i+1] != said[0] {
					t.Fatalf("seed %d, step %d (%d, key %d, group %d, tenant %d), twin %d: %d entries, one by one %d; it says %q",
						seed, step, what, key, group, tenant, i+1, len(got), len(want), said)
				}
			}
		}
		asks := func(w *twin) uint64 { return w.store.Stats().Roots[0].Asks }
		if one, many := asks(twins[0]), asks(twins[len(twins)-1]); one < 100 || many*4 > one*3 {
			t.Errorf("seed %d: %d asks one by one, %d with victims ahead", seed, one, many)
		}
		for _, w := range twins {
			for len(w.flights) > 0 {
				w.finish(0, false)
			}
			for _, l := range w.leases {
				l.Release()
			}
		}
	}
}

// answering is an evict policy that answers every question with the same slots.
type answering []uint32

func (answering) Events([]abi.Event) {}

func (a answering) Victims(_ abi.Ask, dst []uint32) int { return copy(dst, a) }

func answers(slots ...uint32) *policy.Module {
	return policy.NativeModule("answers", []abi.Role{abi.RoleEvict}, func(guest.Info) (any, error) { return answering(slots), nil })
}

// TestSilentPolicies has evict policies that name nobody who can go. What was touched least recently goes in place of the
// store, and silence that lasts is a fault.
func TestSilentPolicies(t *testing.T) {
	for _, tt := range []struct {
		name  string
		names []uint32
	}{
		{"nobody", nil},
		{"a pinned entry", []uint32{0}},
		{"a slot that is free", []uint32{7}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := newFixture(t, 4, 1, func(c *Config) { c.Policies.Evict = handle(answers(tt.names...)) })
			f.mustPut(0, 1, 2, 3)
			held := f.lookup(0)
			defer held.Release()
			for n := uint64(4); n < 10; n++ {
				if err := f.put(n, 0); err != nil {
					t.Fatalf("store %d: %v", n, err)
				}
				if f.has(n-3) || !f.has(n-1) {
					t.Fatalf("store %d: the one touched least recently should have gone", n)
				}
			}
			if st := f.store.Stats().Roots[0]; st.Unanswered != 6 || st.EvictFaults != 0 {
				t.Errorf("%d questions unanswered, %d faults", st.Unanswered, st.EvictFaults)
			}
			for n := uint64(10); n < 10+policy.MaxSilences; n++ {
				f.mustPut(n)
			}
			if st := f.store.Stats().Roots[0]; st.EvictFaults != 1 || !st.Evict.Builtin {
				t.Errorf("%d faults after %d silent answers", st.EvictFaults, policy.MaxSilences+6)
			}
			f.checkUsed()
		})
	}
}

// TestSilenceWithoutEntriesThatCanGo is no fault: all are in use.
func TestSilenceWithoutEntriesThatCanGo(t *testing.T) {
	f := newFixture(t, 4, 1, func(c *Config) { c.Policies.Evict = handle(answers()) })
	f.mustPut(0, 1, 2, 3)
	held := f.lookup(0, 1, 2, 3)
	for n := range uint64(2 * policy.MaxSilences) {
		if err := f.put(10+n, 0); err == nil {
			t.Fatal("a store found room among entries in use")
		}
	}
	if st := f.store.Stats().Roots[0]; st.Unanswered != 0 || st.EvictFaults != 0 {
		t.Errorf("%d questions unanswered, %d faults", st.Unanswered, st.EvictFaults)
	}
	held.Release()
	f.mustPut(9)
	if slices.ContainsFunc([]uint64{0}, f.has) {
		t.Error("the one touched least recently should have gone")
	}
}

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
		Dir: policytest.Dir(t, "lru"), Cache: policytest.Cache(t), Fuel: sandbox.Fuel{Call: 50_000, Record: 1, Time: time.Hour},
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
	f := newFixture(t, 4, 1, func(c *Config) { c.Policies.Evict = handle(m) })
	f.mustPut(0, 1, 2, 3)
	var request uint32
	f.fail(0, &request)
	if st := f.store.Stats().Roots[0]; !st.Evict.Builtin || st.EvictFaults != 1 {
		t.Errorf("after a fault: built-in %t, %d faults, want the built-in policy and 1", st.Evict.Builtin, st.EvictFaults)
	}
	f.mustPut(5)
	if f.has(1) || !f.has(0) || !f.has(5) {
		t.Error("the built-in policy did not evict the least recently touched")
	}
	f.await(false)
	if st := f.store.Stats().Roots[0]; st.Evict.Digest != m.Digest() || m.Quarantined() != nil {
		t.Errorf("after the pause the policy is %s (%v in quarantine), want %s", st.Evict.Digest, m.Quarantined(), m.Digest())
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
	f := newFixture(t, 4, 1, func(c *Config) { c.Policies.Evict = handle(m) })
	f.mustPut(0, 1, 2, 3)
	var request uint32
	for m.Quarantined() == nil {
		f.await(false)
		f.fail(0, &request)
	}
	if st := f.store.Stats().Roots[0]; !st.Evict.Builtin || st.EvictFaults < 2 {
		t.Errorf("in quarantine: built-in %t, %d faults, want the built-in policy and at least 2", st.Evict.Builtin, st.EvictFaults)
	}
	f.mustPut(5)
	f.checkUsed()
}
