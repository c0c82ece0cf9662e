package transfer_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/memfs"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
	"github.com/kvhost/kvhost/host/internal/transfer"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// newMemoryBench is a bench on a root in memory. With holes > 1 all but one of so many pages are taken, so that
// pieces are in many segments.
func newMemoryBench(t testing.TB, geo kv.Geometry, blocks uint32, holes int, change ...func(*store.Config)) (*bench,
	*memfs.FS) {
	t.Helper()
	mem, err := memfs.New(64<<20, nil)
	testenv.OK(t, err)
	t.Cleanup(func() {
		testenv.NoError(t, mem.Close())
	})
	mem.Start(nil)
	if holes > 1 {
		transfer.Fragment(t, mem, holes)
	}
	faulty := faultfs.New(mem)
	b := newBench(t, geo, blocks, append([]func(*store.Config){func(c *store.Config) {
		c.FS, c.Roots[0].Path = faulty, "/root"
	}}, change...)...)
	b.fs, b.root = faulty, "/root"
	return b, mem
}

// byMemory says whether all pieces that moved took the memory route.
func (b *bench) byMemory() error {
	for _, path := range b.engine.Traffic() {
		for _, r := range path.Routes {
			if r.Route != "memory" {
				return fmt.Errorf("%d pieces were %s, %d failed", r.Files, r.Route, r.Errors)
			}
		}
	}
	return nil
}

// memoryPieces lists the files of pieces.
func memoryPieces(t testing.TB, fsys staging.FS, dir string) (names []string) {
	t.Helper()
	list, err := fsys.ReadDir(dir)
	testenv.OK(t, err)
	for _, e := range list {
		switch name := dir + "/" + e.Name(); {
		case !e.IsDir() && strings.HasSuffix(name, ".kv"):
			names = append(names, name)
		case e.IsDir() && e.Name()[0] != '.':
			names = append(names, memoryPieces(t, fsys, name)...)
		}
	}
	return names
}

// A load whose piece is removed, and whose memory others want, still delivers right bytes: the open file keeps it.
func TestMemoryIsKeptForLoads(t *testing.T) {
	geo := kv.Uniform(4, 4, 1, 64<<10)
	const chunks = 8
	b, mem := newMemoryBench(t, geo, geo.Blocks*chunks, 1)
	b.storeChunks(chunks)
	l := b.lease(0, 1, 2, 3, 4, 5, 6, 7)
	defer l.Release()
	var open []*store.Piece
	for i := range chunks {
		p, err := l.Open(i, 0)
		testenv.OK(t, err)
		open = append(open, p)
	}
	for _, name := range memoryPieces(t, mem, "/root") {
		testenv.OK(t, mem.Remove(name))
	}
	other, err := mem.OpenFile("/other", os.O_RDWR|os.O_CREATE, 0o600)
	testenv.OK(t, err)
	defer other.Close()
	ones := make([]byte, 1<<20)
	for i := range ones {
		ones[i] = 0xff
	}
	for at := int64(0); err == nil; at += int64(len(ones)) {
		_, err = other.WriteAt(ones, at)
	}
	for i, p := range open {
		memory, err := staging.MemoryOf(p.File(), p.Size())
		if err != nil || memory == nil {
			t.Fatal(memory == nil, err)
		}
		head, err := p.Verify(memory[0])
		if err != nil {
			t.Fatalf("piece %d: %v", i, err)
		}
		if err := kv.VerifyExtents(head.Plan, 0, len(head.Plan.Extents()), memory[0][head.DataOffset:], 0,
			head.Table); err != nil {
			t.Fatalf("piece %d: %v", i, err)
		}
		p.Close()
	}
}

// Stores and loads run beside each other on a root that evicts all the time. What is loaded is right; what is not
// there is a miss.
func TestMemoryUnderEviction(t *testing.T) {
	geo := kv.Uniform(4, 3, 1, 20000)
	const sets, keys = 4, 64
	b, mem := newMemoryBench(t, geo, geo.Blocks*sets, 1, func(c *store.Config) { c.Roots[0].Capacity = 4 << 20 })
	var wg sync.WaitGroup
	loaded := make([]int, sets)
	for s := range sets {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(s), 3))
			blocks := make([]uint32, geo.Blocks)
			for i := range blocks {
				blocks[i] = uint32(s)*geo.Blocks + uint32(i)
			}
			for range 300 {
				n := rng.IntN(keys)
				l, err := b.store.Lookup(store.LookupRequest{Namespace: b.space, Keys: []kv.Key{key(n)}, Ranks: 1})
				if err != nil {
					t.Error(err)
					return
				}
				if l.Hits() == 1 {
					for plane := range geo.Planes {
						for _, id := range blocks {
							clear(b.page(plane, id))
						}
					}
					if out := b.load(l, []transfer.LoadChunk{{Blocks: blocks}}, nil); len(out.Failed) > 0 {
						t.Errorf("chunk %d: %v", n, out.Failed)
					} else if err := b.checkPages(n, blocks); err != nil {
						t.Error(err)
					}
					loaded[s]++
					l.Release()
					continue
				}
				l.Release()
				for plane := range geo.Planes {
					for i, id := range blocks {
						b.fill(b.page(plane, id), key(n), plane, i)
					}
				}
				p, err := b.store.Put(context.Background(), store.PutRequest{Namespace: b.space, Key: key(n), Ranks: 1})
				if err != nil {
					continue // another is storing it, or everything is pinned
				}
				b.storeAll(transfer.StoreChunk{Put: p, Blocks: blocks})
			}
		})
	}
	wg.Wait()
	if most := memfs.Usable(64 << 20); mem.Stats().Used > most {
		t.Errorf("%d bytes in use, at most %d", mem.Stats().Used, most)
	}
	if used := mem.Stats().Used; used > 4<<20+64<<10 {
		t.Errorf("%d bytes in use in a root of 4 MiB", used)
	}
	testenv.NoError(t, b.byMemory())
	for s, n := range loaded {
		if n == 0 {
			t.Errorf("goroutine %d loaded nothing", s)
		}
	}
}

// Storing and loading a chunk in memory allocates no more than doing so in a file.
func TestMemoryAllocatesNoMore(t *testing.T) {
	geo := kv.Uniform(16, 8, 1, 64<<10)
	allocations := func(b *bench) float64 {
		b.storeChunks(1)
		l := b.lease(0)
		defer l.Release()
		loads := b.spread(1)
		return testing.AllocsPerRun(20, func() {
			if out := b.load(l, loads, nil); len(out.Failed) > 0 {
				t.Fatal(out)
			}
		})
	}
	inMemory, _ := newMemoryBench(t, geo, geo.Blocks, 1)
	memory, files := allocations(inMemory), allocations(newBench(t, geo, geo.Blocks))
	if memory > files {
		t.Errorf("%.1f allocations in memory, %.1f in a file", memory, files)
	}
	t.Logf("%.1f allocations in memory, %.1f in a file", memory, files)
}
