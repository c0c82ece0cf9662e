package transfer_test

import (
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/memfs"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/transfer"
	"github.com/kvhost/kvhost/host/kv"
	"golang.org/x/sys/unix"
)

// inANextLife is a bench with memory before its root, whose chunks are in the root alone: the host that stored them has ended.
func inANextLife(t testing.TB, geo kv.Geometry, chunks int) *bench {
	var memories [2]*memfs.FS
	for i := range memories { // before the bench, so that they are closed after its store
		m, err := memfs.New(128<<20, nil) // loads fill a quarter of it at a time
		testenv.OK(t, err)
		t.Cleanup(func() { testenv.NoError(t, m.Close()) })
		m.Start(nil)
		memories[i] = m
	}
	near := func(life int) store.RootConfig {
		return store.RootConfig{
			Path: "memory:", Medium: store.Medium{FS: memories[life], Traits: store.Memory}, ForPieces: true, Capacity: 128 << 20,
			Write: store.WriteThrough,
		}
	}
	b := newBench(t, geo, geo.Blocks*uint32(chunks), func(c *store.Config) {
		far := c.Roots[0]
		far.Level = 1
		c.Roots, c.Moves.Shutdown = []store.RootConfig{near(0), far}, time.Minute
	})
	b.storeChunks(chunks)
	testenv.OK(t, b.store.Close())
	b.config.Roots[0] = near(1)
	b.open()
	<-b.store.ScanDone()
	return b
}

// TestLoadBringsNear: what a load reads from a disk is in memory when it ends, and the next load reads it there, right: with loads by layer, too,
// whose steps read a piece in parts.
func TestLoadBringsNear(t *testing.T) {
	for name, geo := range geometries {
		for _, by := range []struct {
			name   string
			layers *transfer.Layers
		}{{"whole", nil}, {"layers", &transfer.Layers{}}} {
			t.Run(name+"/"+by.name, func(t *testing.T) {
				const chunks = 3
				b := inANextLife(t, geo, chunks)
				all := []int{0, 1, 2}
				for _, from := range []string{b.root, "memory:"} {
					l := b.lease(all...)
					for i := range all {
						if got := l.Root(i); got != from {
							t.Fatalf("chunk %d is in %s, want %s", i, got, from)
						}
					}
					b.poison()
					loads := b.spread(chunks)
					if out := b.load(l, loads, by.layers); len(out.Failed) > 0 {
						t.Fatalf("the load: %+v", out)
					}
					for _, c := range loads {
						testenv.NoError(t, b.checkPages(c.Index, c.Blocks))
					}
					if got := b.store.Stats().Roots[0].Entries; got != chunks { // before the lease ends: no copy in the background
						t.Errorf("%d chunks are in memory, want %d", got, chunks)
					}
					l.Release()
				}
			})
		}
	}
}

// BenchmarkFirstLoad measures the first load of chunks that are in files, with memory that they come to and without.
func BenchmarkFirstLoad(b *testing.B) {
	geo := kv.Uniform(16, 16, 1, 4096)
	for name, open := range map[string]func(t testing.TB, geo kv.Geometry, chunks int) *bench{
		"to memory": inANextLife,
		"files alone": func(t testing.TB, geo kv.Geometry, chunks int) *bench {
			rig := newBench(t, geo, geo.Blocks*uint32(chunks))
			rig.storeChunks(chunks)
			return rig
		},
	} {
		b.Run(name, func(b *testing.B) {
			rig := open(b, geo, b.N)
			all := make([]int, b.N)
			for i := range all {
				all[i] = i
			}
			l := rig.lease(all...)
			loads := rig.spread(b.N)
			b.SetBytes(geo.PageBytes())
			var before, after unix.Rusage
			testenv.OK(b, unix.Getrusage(unix.RUSAGE_SELF, &before))
			b.ResetTimer()
			if out := rig.load(l, loads, nil); len(out.Failed) > 0 {
				b.Fatalf("the load: %+v", out)
			}
			b.StopTimer()
			testenv.OK(b, unix.Getrusage(unix.RUSAGE_SELF, &after))
			spent := after.Utime.Nano() + after.Stime.Nano() - before.Utime.Nano() - before.Stime.Nano()
			b.ReportMetric(float64(spent)/float64(b.N), "cpu-ns/op")
			l.Release()
		})
	}
}
