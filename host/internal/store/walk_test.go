package store

import (
	"log/slog"
	"math/rand/v2"
	"testing"

	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/kv"
)

// TestLookupReadsAhead asks for long lists of keys, some of which are in either of two roots and some in none: what is
// read ahead is of the root where the last key was found, and much of it is of no use.
func TestLookupReadsAhead(t *testing.T) {
	for _, c := range []struct {
		name        string
		here, there float64 // the parts of the keys that are in the first root, and in the second
		stay        int     // keys in a row that are in one root
	}{
		{"all in the first", 1, 0, 1},
		{"all in the second", 0, 1, 1},
		{"anywhere", 0.4, 0.4, 1},
		{"runs", 0.5, 0.5, 20},
		{"few", 0.05, 0.05, 3},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := &fixture{TB: t, ns: testNamespace(1)}
			root := func() RootConfig {
				return RootConfig{Path: t.TempDir(), Capacity: 10_000 * pieceBytes, MaxEntries: 10_000}
			}
			f.cfg = Config{Roots: []RootConfig{root(), root()}, Log: slog.New(slog.DiscardHandler)}
			f.start()
			defer f.store.Close()
			rng := rand.New(rand.NewPCG(1, uint64(c.stay)))
			class := f.space.Class(1)
			f.store.catalog.Tenants.Number(0)
			var keys []kv.Key
			want := map[int]int{}
			where := index.None
			for n := range 3000 {
				if n%c.stay == 0 {
					where = index.None
					if at := rng.Float64(); at < c.here {
						where = 0
					} else if at < c.here+c.there {
						where = 1
					}
				}
				k := testKey(uint64(n))
				keys = append(keys, k)
				if where == index.None {
					continue
				}
				r := f.store.roots[where]
				r.Lock()
				slot := r.Index.Add(class.Printer.Print(&k), index.Owner{Class: class.ID}, &k, 0, 0)
				class.Ref()
				r.Index.At(slot).Set(index.Complete)
				r.Index.SetPieces(slot, 1)
				r.Unlock()
				want[n] = int(where)
			}
			for from := range 70 {
				l, err := f.store.Lookup(LookupRequest{Namespace: f.space, Group: 1, Keys: keys[from:]})
				must(t, err)
				for i := range keys[from:] {
					at, there := want[from+i]
					if l.Has(i) != there || there && int(l.grants[i].Root) != at {
						t.Fatalf("from %d: key %d: %+v, want %t in root %d", from, i, l.grants[i], there, at)
					}
				}
				l.Release()
			}
			for _, r := range f.store.roots {
				r.Index.Each(func(slot uint32, e *index.Entry) {
					if e.Pins() != 0 || e.LastTouch() == 0 {
						t.Fatalf("slot %d: %d pins, touched %d", slot, e.Pins(), e.LastTouch())
					}
				})
			}
		})
	}
}
