package store

import (
	"context"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/policy"
	"github.com/kvhost/kvhost/host/store/catalog"
	"github.com/kvhost/kvhost/host/store/index"
	"github.com/kvhost/kvhost/plugins/fanout"
)

// storeTogether puts chunks [from, to) as one request does, every rank's piece of each.
func (f *fixture) storeTogether(from, to uint64) {
	f.Helper()
	for rank := range uint32(f.ns.Ranks()) {
		var list []chunk.Key
		for n := from; n < to; n++ {
			list = append(list, testKey(n))
		}
		foreseen := catalog.PrefetchPaths(list)
		for n := from; n < to; n++ {
			q := f.request(n, n-1, rank)
			q.Prefetch = foreseen
			p, err := f.store.Put(context.Background(), q)
			if err != nil {
				f.Fatalf("put %d rank %d: %v", n, rank, err)
			}
			if err := write(p); err != nil {
				f.Fatal(err)
			}
			if err := p.Publish(context.Background()); err != nil {
				f.Fatal(err)
			}
		}
	}
}

// TestPiecesAreNamedTogether stores requests, two ranks each, into a root that holds two of them, and loads them: the
// files stand where the policy puts each by itself, and there is one crossing for many of the names.
func TestPiecesAreNamedTogether(t *testing.T) {
	const chunks = 25
	f := newFixture(t, t.TempDir(), 2*chunks, 2, func(c *Config) {
		c.Policies.Place = use(t, "fanout", nil, nil)
		c.Policies.Evict = use(t, "lru", nil, nil)
	})
	place := f.space.Class(0).Place.Policy
	before := place.Stats()
	for round := range uint64(4) {
		first := round * 100
		f.storeTogether(first, first+chunks)
		var list []uint64
		for n := first; n < first+chunks; n++ {
			list = append(list, n)
		}
		l := f.lookup(list...)
		if l.Hits() != chunks {
			t.Fatalf("%d hits", l.Hits())
		}
		for rank := range uint32(2) {
			l.Prepare(0, rank)
			prepared := place.Stats().Calls
			for i := range list {
				p, err := l.Open(i, rank)
				if err != nil {
					t.Fatal(err)
				}
				p.Close()
			}
			if more := place.Stats().Calls - prepared; more > 0 {
				t.Errorf("rank %d: %d calls for paths that were prepared", rank, more)
			}
		}
		if len(l.paths) > 0 {
			t.Errorf("%d path batches are kept", len(l.paths))
		}
		l.Release()
	}
	// 200 puts, 200 loads, 100 victims' pieces
	s := place.Stats()
	if names, calls := s.Records-before.Records, s.Calls-before.Calls; names < 500 || names/calls < 8 || s.Faults > 0 {
		t.Errorf("%d names in %d calls, %d faults", names, calls, s.Faults)
	}
	if got := f.store.Stats().Roots[0]; got.Evictions != 50 {
		t.Errorf("%d evictions", got.Evictions)
	}
	f.mustRead(300)
	f.checkUsed()
	if got := len(f.files()); got != 100 {
		t.Errorf("%d files", got)
	}
}

// fussy is fanout, and chooses a root that there is not for one key.
type fussy struct {
	*fanout.Policy
	key chunk.Key
}

func (p *fussy) Place(q *abi.PlaceQuery, roots []abi.RootFacts, dst []byte) ([]byte, uint32) {
	if q.Key == p.key {
		return append(dst, "nowhere"...), 7
	}
	return p.Policy.Place(q, roots, dst)
}

// TestOneFaultAmongManyNames: a policy that fails for one key costs only that key its name.
func TestOneFaultAmongManyNames(t *testing.T) {
	m := policy.NativeModule("fussy", []abi.Role{abi.RolePlace}, func(i guest.Info) (any, error) {
		p, err := fanout.New(i)
		return &fussy{p, testKey(7)}, err
	})
	f := newFixture(t, t.TempDir(), 40, 1, func(c *Config) { c.Policies.Place = handle(m) })
	f.storeTogether(0, 20)
	for n := range uint64(20) {
		f.mustRead(n)
	}
	r := f.store.roots[0]
	r.Index.Each(func(slot uint32, e *index.Entry) {
		if k := r.Index.Key(slot); e.Is(index.FallbackName) != (k == testKey(7)) {
			t.Errorf("entry %s: under the built-in name %v", k, e.Is(index.FallbackName))
		}
	})
}
