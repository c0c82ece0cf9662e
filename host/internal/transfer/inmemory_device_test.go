package transfer

import (
	"bytes"
	"errors"
	"maps"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/internal/memfs"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// newMemoryRig is a deviceRig on a root in memory that is registered with the GPU.
func newMemoryRig(
	t testing.TB, geo kv.Geometry, blocks uint32, change ...func(*store.Config)) (*deviceRig, *memfs.FS) {
	t.Helper()
	return newMemoryRigOf(t, "bf16", geo, blocks, change...)
}

// newMemoryRigOf is newMemoryRig for pages of a dtype.
func newMemoryRigOf(
	t testing.TB, dtype string, geo kv.Geometry, blocks uint32, change ...func(*store.Config)) (*deviceRig, *memfs.FS) {
	t.Helper()
	const bytes = 96 << 20 // all of it is touched
	mem, err := memfs.New(bytes, nil)
	testenv.OK(t, err)
	t.Cleanup(func() {
		testenv.NoError(t, mem.Close())
	})
	faulty := faultfs.New(mem)
	r := newDeviceRigOf(t, dtype, geo, blocks, 16<<20, append(change, func(c *store.Config) {
		c.FS, c.Roots[0].Path, c.Roots[0].Capacity = faulty, "/root", memfs.Usable(bytes)
	})...)
	r.root, r.fs = "/root", faulty
	mem.Start(nil, r.gpu.Pinner())
	<-mem.Grown()
	t.Cleanup(func() {
		testenv.NoError(t, mem.Unlock())
	})
	return r, mem
}

// memoryFile returns the memory of a chunk's file.
func (r *deviceRig) memoryFile(mem *memfs.FS, n int) staging.Segments {
	r.t.Helper()
	var find func(dir string) string
	find = func(dir string) string {
		list, err := mem.ReadDir(dir)
		testenv.OK(r.t, err)
		for _, e := range list {
			name := dir + "/" + e.Name()
			if !e.IsDir() && strings.HasPrefix(e.Name(), deviceKey(n).String()) {
				return name
			}
			if e.IsDir() && e.Name()[0] != '.' {
				if found := find(name); found != "" {
					return found
				}
			}
		}
		return ""
	}
	f, err := mem.OpenFile(find(r.root), os.O_RDONLY, 0)
	testenv.OK(r.t, err)
	defer f.Close()
	s, err := staging.MemoryOf(f, 1)
	if err != nil || s == nil {
		r.t.Fatal(s == nil, err)
	}
	return s
}

// lookup looks one chunk up.
func (r *deviceRig) lookup(n int) *store.Lease {
	r.t.Helper()
	l, err := r.store.Lookup(store.LookupRequest{Namespace: r.space, Keys: []kv.Key{deviceKey(n)}, Ranks: 1})
	testenv.OK(r.t, err)
	return l
}

// hits is how many of one chunk the store has: 0 or 1.
func (r *deviceRig) hits(n int) int {
	r.t.Helper()
	l := r.lookup(n)
	defer l.Release()
	return l.Hits()
}

// A step of a layer-wise load of many small pieces is copied in few launches, and each piece still fails or succeeds by itself.
func TestSmallPiecesShareLaunches(t *testing.T) {
	const chunks, damaged = 48, 17
	for _, c := range []struct {
		name, rules string
		page        uint32
		damage      bool
		launches    int // 0: not counted
	}{
		{"small", "", 2048, false, 4 * 8 * 2}, // steps, bundles of six pieces each, and kernels
		{"as large as a window", "", 104857, false, 0},
		{"damaged in memory", "", 2048, true, 0},
		{"wrong on the bus, once", "cuMemcpyAsync:nth=9:flip=100", 2048, false, 0},
		{"wrong on the bus, always", "cuMemcpyAsync:flip=100", 2048, false, 0},
		{"a launch that fails", "cuLaunchKernel:nth=5:code=1", 2048, false, 0},
		{"checksums that fail", "sums:code=1", 2048, true, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			r, mem := newMemoryRig(t, kv.Uniform(2, 6, 1, c.page), 2*chunks)
			if r.double == nil && c.rules != "" {
				t.Skip("needs a driver with faults")
			}
			var stored []StoreChunk
			all := make([]int, chunks)
			for n, ids := range r.shuffled(chunks) {
				all[n], stored = n, append(stored, r.put(n, ids))
			}
			r.mustStore(stored...)
			if c.damage {
				s := r.memoryFile(mem, damaged)
				s.From(r.plan(damaged).Extents()[3].Off + 4096)[5] ^= 1
			}
			r.poison()
			to := r.shuffled(chunks)
			r.rules(c.rules)
			var landed []uint32
			out := r.loadTo(r.queue, r.memory, all, to, &Layers{Landed: func(layer uint32, _ []int) { landed = append(landed, layer) }})
			calls := 0
			if r.double != nil {
				calls = r.double.Calls("cuLaunchKernel")
			}
			r.rules("")
			if c.launches > 0 && calls != c.launches && r.double != nil {
				t.Errorf("%d launches, want %d", calls, c.launches)
			}
			if len(landed) != 6 {
				t.Errorf("layers %v landed, want all six", landed)
			}
			for _, f := range out.Failed {
				if !c.damage || f.Chunk != damaged || !errors.Is(f.Err, kv.ErrChecksum) {
					t.Errorf("chunk %d failed: %v", f.Chunk, f.Err)
				}
			}
			if c.damage && len(out.Failed) != 1 {
				t.Errorf("%d chunks failed, want the damaged one", len(out.Failed))
			}
			for n, ids := range to {
				testenv.NoError(t, r.holds(n, ids, c.damage && n == damaged))
			}
		})
	}
}

// A load that is cancelled while its pieces share launches touches no page afterwards.
func TestCancelOfSharedLaunches(t *testing.T) {
	const chunks = 48
	r, _ := newMemoryRig(t, kv.Uniform(2, 6, 1, 2048), 2*chunks)
	var stored []StoreChunk
	for n, ids := range r.shuffled(chunks) {
		stored = append(stored, r.put(n, ids))
	}
	r.mustStore(stored...)
	r.poison()
	to := r.shuffled(chunks)
	job := &LoadJob{Memory: r.memory, Held: true}
	var keys []kv.Key
	for n := range chunks {
		keys = append(keys, deviceKey(n))
		job.Chunks = append(job.Chunks, LoadChunk{Index: n, Blocks: to[n]})
	}
	l, err := r.store.Lookup(store.LookupRequest{Namespace: r.space, Keys: keys, Ranks: 1})
	testenv.OK(t, err)
	defer l.Release()
	job.Lease = l
	done := make(chan Outcome, 1)
	job.Done = func(o Outcome) { done <- o }
	cancel := make(chan struct{})
	job.Layers = &Layers{Landed: func(layer uint32, _ []int) {
		if layer == 0 {
			close(cancel)
		}
	}}
	r.rules("cuEventSynchronize:every=3:delay=2")
	h := r.queue.Load(job)
	h.Begin()
	<-cancel
	h.Cancel()
	<-h.Fenced()
	r.rules("")
	read := func() (image []byte) {
		for _, p := range r.planes {
			b := make([]byte, p.Size)
			r.on(func(th *gds.Thread) error { return th.Read(b, p.Address) })
			image = append(image, b...)
		}
		return image
	}
	fenced := read()
	for _, f := range (<-done).Failed {
		if !errors.Is(f.Err, ErrCancelled) {
			t.Errorf("chunk %d: %v, want %v", f.Chunk, f.Err, ErrCancelled)
		}
	}
	if !bytes.Equal(read(), fenced) {
		t.Error("pages changed after the fence")
	}
	for n, ids := range to {
		testenv.NoError(t, r.holds(n, ids, true))
	}
}

// panicking is a route that panics on one of the loads that it is asked for.
type panicking struct {
	route
	asked *atomic.Int32
}

func (p panicking) load(l *loading) error {
	if p.asked.Add(1) == 3 {
		panic("a test")
	}
	return p.route.load(l)
}

// A load ends where a piece that shares a launch has panicked, and only pieces of that launch fail.
func TestPanicAmongSharedLaunches(t *testing.T) {
	const chunks, together = 48, 6
	r, _ := newMemoryRig(t, kv.Uniform(2, 6, 1, 2048), 2*chunks)
	var stored []StoreChunk
	all := make([]int, chunks)
	for n, ids := range r.shuffled(chunks) {
		all[n], stored = n, append(stored, r.put(n, ids))
	}
	r.mustStore(stored...)
	r.poison()
	asked, to := new(atomic.Int32), r.shuffled(chunks)
	for i, way := range r.engine.routes {
		if _, ok := way.(memoryRoute); ok {
			r.engine.routes[i] = panicking{way, asked}
		}
	}
	out := r.loadTo(r.queue, r.memory, all, to, &Layers{})
	failed := map[int]bool{}
	for _, f := range out.Failed {
		if failed[f.Chunk] = true; !errors.Is(f.Err, errPanicked) {
			t.Errorf("chunk %d: %v, want %v", f.Chunk, f.Err, errPanicked)
		}
	}
	if len(failed) == 0 || len(failed) > together {
		t.Errorf("chunks %v failed, want some of %d", slices.Sorted(maps.Keys(failed)), together)
	}
	for n, ids := range to {
		testenv.NoError(t, r.holds(n, ids, failed[n]))
	}
}
