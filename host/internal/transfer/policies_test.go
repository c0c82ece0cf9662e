package transfer_test

import (
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/transfer"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/plugins/blockmajor"
	"github.com/kvhost/kvhost/plugins/fanout"
	"github.com/kvhost/kvhost/plugins/layermajor"
	"github.com/kvhost/kvhost/plugins/llmd"
	"github.com/kvhost/kvhost/plugins/striped"
)

// BenchmarkPiece stores small pieces, and loads one again and again, whole and by layers, by each route that host memory has:
// what a route costs besides the bytes that it moves.
func BenchmarkPiece(b *testing.B) {
	geo := kv.Uniform(2, 2, 1, 4096)
	small := func(c *store.Config) { c.Roots[0].Capacity = 16 << 20 } // a store evicts
	inMemory := func(b *testing.B) *bench {
		made, _ := newMemoryBench(b, geo, geo.Blocks, 1, small)
		return made
	}
	for name, make := range map[string]func(b *testing.B) *bench{
		"memory":             inMemory,
		"staged":             func(b *testing.B) *bench { return newBench(b, geo, geo.Blocks, small) },
		"staged, compressed": func(b *testing.B) *bench { return newCompressed(b, geo, geo.Blocks, small) },
	} {
		for how, layers := range map[string]*transfer.Layers{"whole": nil, "by layers": {}} {
			b.Run(name+"/"+how, func(b *testing.B) {
				r := make(b)
				r.storeChunks(1)
				l := r.lease(0)
				defer l.Release()
				loads := r.spread(1)
				b.ReportAllocs()
				for b.Loop() {
					if out := r.load(l, loads, layers); len(out.Failed) > 0 {
						b.Fatal(out.Failed)
					}
				}
			})
		}
		b.Run(name+"/store", func(b *testing.B) {
			r := make(b)
			b.ReportAllocs()
			for n := 0; b.Loop(); n++ {
				if _, out := r.storeAll(r.put(n, []uint32{0, 1})); len(out.Failed) > 0 {
					b.Fatal(out.Failed)
				}
			}
		})
	}
}

func native[P any](name string, role abi.Role, make func(guest.Info) (P, error)) *policy.Handle {
	m := policy.NativeModule(name, []abi.Role{role}, func(i guest.Info) (any, error) { return make(i) })
	return policy.NewHandle(m, "", nil, nil)
}

// TestPlacesAndLayoutsRoundTrip takes chunks through every first-party place and layout policy: stored, found again by
// their names after a restart, and read back under another layout.
func TestPlacesAndLayoutsRoundTrip(t *testing.T) {
	places := map[string]struct {
		handle *policy.Handle
		roots  int
		named  string // part of each piece's path
	}{
		"fanout":  {native("fanout", abi.RolePlace, fanout.New), 1, ".kv"},
		"llmd":    {native("llmd", abi.RolePlace, llmd.New), 1, "/test_model_"},
		"striped": {native("striped", abi.RolePlace, striped.New), 3, ".kv"},
	}
	layouts := map[string]*policy.Handle{
		"layermajor": native("layermajor", abi.RoleLayout, layermajor.New),
		"blockmajor": native("blockmajor", abi.RoleLayout, blockmajor.New),
	}
	geo := kv.Uniform(4, 3, 2, 6000)
	const chunks = 12
	for place, p := range places {
		for layout, l := range layouts {
			t.Run(place+"/"+layout, func(t *testing.T) {
				b := newBench(t, geo, geo.Blocks*chunks, func(c *store.Config) {
					c.Policies.Place, c.Policies.Layout = p.handle, l
					for i := 1; i < p.roots; i++ {
						r := c.Roots[0]
						r.Path += strings.Repeat("x", i)
						c.Roots = append(c.Roots, r)
					}
				})
				b.storeChunks(chunks)
				used := map[string]int{}
				for _, r := range b.config.Roots {
					err := filepath.WalkDir(r.Path, func(path string, d os.DirEntry, err error) error {
						if err == nil && d.Type().IsRegular() && !strings.Contains(path, "/.kvhost") {
							used[r.Path]++
							if !strings.Contains(path, p.named) {
								t.Errorf("%s is not named as %s names", path, place)
							}
						}
						return err
					})
					testenv.OK(t, err)
				}
				if len(used) != p.roots {
					t.Errorf("pieces by root: %v, want %d roots in use", used, p.roots)
				}
				for now := range layouts { // what was written under one layout is read under any
					testenv.OK(t, b.store.Close())
					b.config.Policies.Layout = layouts[now]
					b.open()
					var all []int
					for n := range chunks {
						all = append(all, n)
					}
					lease := b.lease(all...)
					if lease.Hits() != chunks {
						t.Fatalf("%d of %d found after a restart", lease.Hits(), chunks)
					}
					b.poison()
					loads := make([]transfer.LoadChunk, chunks)
					ids := b.shuffled(int(geo.Blocks) * chunks)
					for n := range loads {
						loads[n] = transfer.LoadChunk{Index: n, Blocks: ids[n*int(geo.Blocks) : (n+1)*int(geo.Blocks)]}
					}
					if out := b.load(lease, loads, nil); len(out.Failed) > 0 {
						t.Fatal(out.Failed[0].Err)
					}
					for n, c := range loads {
						testenv.NoError(t, b.checkPages(n, c.Blocks))
					}
					lease.Release()
				}
			})
		}
	}
}

// namer is fanout, and counts the names that it gives.
type namer struct {
	*fanout.Policy
	named *atomic.Int32
}

func (n namer) Place(q *abi.PlaceQuery, roots []abi.RootFacts, dst []byte) ([]byte, uint32) {
	n.named.Add(1)
	return n.Policy.Place(q, roots, dst)
}

// A piece is named once, when it is stored: a load asks nobody, and its workers wait for no policy.
func TestALoadAsksForNoNames(t *testing.T) {
	const chunks = 12
	geo := kv.Uniform(4, 3, 2, 6000)
	var named atomic.Int32
	b := newBench(t, geo, geo.Blocks*chunks, func(c *store.Config) {
		c.Policies.Place = native("namer", abi.RolePlace, func(i guest.Info) (namer, error) {
			p, err := fanout.New(i)
			return namer{p, &named}, err
		})
	})
	b.storeChunks(chunks)
	if named.Load() < chunks {
		t.Fatalf("%d of %d pieces named", named.Load(), chunks)
	}
	loads := b.spread(chunks)
	var all []int
	for n := range loads {
		all = append(all, n)
	}
	asked := named.Load()
	for name, layers := range map[string]*transfer.Layers{"whole": nil, "by layer": {}} {
		t.Run(name, func(t *testing.T) {
			lease := b.lease(all...)
			defer lease.Release()
			b.poison()
			done := make(chan transfer.Outcome, 1)
			job := transfer.LoadJob{Lease: lease, Memory: b.memory, Chunks: loads, Held: true, Layers: layers,
				Done: func(out transfer.Outcome) { done <- out }}
			b.queue.Load(&job).Begin()
			if out := <-done; len(out.Failed) > 0 {
				t.Fatal(out.Failed[0].Err)
			}
			if more := named.Load() - asked; more > 0 {
				t.Errorf("%d names asked for by a load", more)
			}
		})
	}
}
