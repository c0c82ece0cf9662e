package store

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/policy/policytest"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/index"
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
		w.root.drop(entries.Mark{Slot: slot, Fingerprint: fp}, 0)
	}
}

// TestForetoldVictimsAreThoseNamedOneByOne has lru natively, which may not name victims ahead, beside itself where it
// may, natively and in wasm: after each of many random steps the same entries are resident, in one order.
func TestForetoldVictimsAreThoseNamedOneByOne(t *testing.T) {
	compareForetold(t, func() []*twin {
		return []*twin{newTwin(t, nil), newTwin(t, use(t, "lru", nil, nil).Module)}
	})
}

// TestForetoldVictimsInC is the same with recency, a policy in C.
func TestForetoldVictimsInC(t *testing.T) {
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
