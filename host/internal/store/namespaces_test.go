package store

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/internal/store/moves"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
)

// kept are the namespaces that the root has kept.
func (f *fixture) kept() int {
	f.Helper()
	list, err := os.ReadDir(filepath.Join(f.cfg.Roots[0].Path, pieceformat.NamespacesDir))
	must(f, err)
	return len(list)
}

func numbered(s *Store) int { return len(s.catalog.Namespaces()) }

// TestNamespacesWithoutEntriesLoseTheirPlace opens two more namespaces, one of which has an entry for a while, and
// starts again by either way.
func TestNamespacesWithoutEntriesLoseTheirPlace(t *testing.T) {
	for _, how := range []string{"checkpoint", "scan"} {
		t.Run(how, func(t *testing.T) {
			f := newFixture(t, 8, 1)
			f.mustPut(0)
			mine := f.space
			for n := range 2 {
				other := testNamespace(1)
				other.Revision = fmt.Sprint("other ", n)
				var err error
				f.space, err = f.store.Namespace(context.Background(), other)
				must(t, err)
				if n == 1 {
					f.mustPut(1)
					f.drop(1)
				}
			}
			f.space = mine
			if numbered(f.store) != 3 || f.kept() != 3 {
				t.Fatalf("%d have a number, %d are kept", numbered(f.store), f.kept())
			}
			if how == "scan" {
				f.crash()
			} else {
				f.restart()
			}
			<-f.store.ScanDone()
			if numbered(f.store) != 1 || f.kept() != 1 {
				t.Fatalf("%d have a number, %d are kept", numbered(f.store), f.kept())
			}
			f.mustRead(0)
		})
	}
}

// TestMoreNamespacesKeptThanPlaces starts on a root that has kept more namespaces than there are places for.
func TestMoreNamespacesKeptThanPlaces(t *testing.T) {
	testenv.Slow(t)
	f := newFixture(t, 8, 1)
	f.mustPut(0)
	must(t, f.store.Close())
	for n := range catalog.MaxNamespaces + 10 {
		other := testNamespace(1)
		other.Revision = fmt.Sprint("other ", n)
		put(t, filepath.Join(f.cfg.Roots[0].Path, pieceformat.NamespacesDir, other.Digest().String()), []byte(other.Text()))
	}
	f.start()
	<-f.store.ScanDone()
	f.mustRead(0)
	f.mustPut(1)
	if f.kept() != 1 {
		t.Errorf("%d namespaces are kept", f.kept())
	}
}

// TestDormantNamespaceIsLent: files of a namespace that no session has opened since the start are lent as they are.
func TestDormantNamespaceIsLent(t *testing.T) {
	for name, again := range map[string]func(*fixture){"checkpoint": (*fixture).restart, "scan": (*fixture).crash} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, 8, 1)
			f.mustPut(0)
			stored := f.ns.Digest()
			f.ns.Revision = "other"
			again(f)
			<-f.store.ScanDone()
			l, err := f.store.Lend(stored, anyone{}, LookupRequest{Keys: keys(0), Ranks: 1, Leading: true})
			must(t, err)
			defer l.Release()
			equal(t, "entries lent", l.Hits(), 1)
			p, err := l.Open(0, 0)
			must(t, err)
			defer p.Close()
			equal(t, "its bytes", p.Size(), pieceBytes)
			equal(t, "damaged files", f.store.Stats().Roots[0].Damaged, 0)
		})
	}
}

// greedy is an admit policy that lets everything move.
type greedy struct{}

func (greedy) Admit(_ []abi.Candidate, dst []bool) {
	for i := range dst {
		dst[i] = true
	}
}

// TestDormantNamespaceIsCopied: what must leave gets its copy in the next level, though no session has opened its namespace since the start.
func TestDormantNamespaceIsCopied(t *testing.T) {
	f := twoLevels(t, 16, 256, func(c *Config) {
		c.Policies.Admit = handle(policy.NativeModule("greedy", []abi.Role{abi.RoleAdmit}, func(guest.Info) (any, error) { return greedy{}, nil }))
		c.Policies.Admit.Levels = 2
	})
	stored := *f.ns
	for n := range uint64(12) {
		f.mustPut(n)
	}
	f.ns.Revision = "other"
	f.restart()
	<-f.store.ScanDone()
	for n := uint64(100); n < 164; n++ {
		f.mustPut(n)
		f.settle()
	}
	equal(t, "copies that failed", f.moved(1, moves.Demotion).Failed.Load(), 0)
	var err error
	f.space, err = f.store.Namespace(t.Context(), &stored)
	must(t, err)
	for n := range uint64(12) {
		equal(t, "the level of what has left", f.rootOf(n), 1)
		f.mustRead(n)
	}
}

// TestTemporariesOfMeta leaves some beside the store's own files.
func TestTemporariesOfMeta(t *testing.T) {
	dir := t.TempDir()
	f := newFixtureIn(t, dir, 4, 1)
	f.mustPut(0)
	mine := func(d string) string { return pieceformat.TempName(filepath.Join(dir, d, "x"), "testhost", 7) }
	others := pieceformat.TempName(filepath.Join(dir, pieceformat.MetaDir, "x"), "otherhost", 7)
	for _, shared := range []bool{true, false} {
		f.store.Close()
		for _, name := range []string{
			mine(pieceformat.MetaDir), mine(pieceformat.NamespacesDir), mine(pieceformat.PlansDir), others,
		} {
			put(t, name, []byte("left"))
		}
		f.cfg.Roots[0].Shared = shared
		f.start()
		for _, name := range []string{
			mine(pieceformat.MetaDir), mine(pieceformat.NamespacesDir), mine(pieceformat.PlansDir),
		} {
			if _, err := os.Stat(name); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("shared %t: %s: %v", shared, name, err)
			}
		}
		if _, err := os.Stat(others); (err == nil) != shared {
			t.Errorf("shared %t: another host's: %v", shared, err)
		}
	}
}

// TestLookupReadsAhead asks for long lists of keys, some of which are in either of two roots and some in none: what is
// read ahead is of the root where the last key was found, and much of it is of no use.
func TestLookupReadsAhead(t *testing.T) {
	testenv.Slow(t)
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

// anyone is a host that is lent whatever it asks for.
type anyone struct{}

func (anyone) Take(uint32, uint32, int, int) bool { return true }
func (anyone) Give(uint32, uint32)                {}
