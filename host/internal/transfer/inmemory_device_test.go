package transfer

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/host/internal/memfs"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
	"github.com/kvhost/kvhost/staging/faultfs"
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
	mem, err := memfs.New(128<<20, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := mem.Close(); err != nil {
			t.Error(err)
		}
	})
	faulty := faultfs.New(mem)
	r := newDeviceRigOf(t, dtype, geo, blocks, 16<<20, append(change, func(c *store.Config) {
		c.FS, c.Roots[0].Path, c.Roots[0].Capacity = faulty, "/root", memfs.Usable(128<<20)
	})...)
	r.root, r.fs = "/root", faulty
	mem.Start(nil, r.gpu.Pinner())
	<-mem.Grown()
	t.Cleanup(func() {
		if err := mem.Unlock(); err != nil {
			t.Error(err)
		}
	})
	return r, mem
}

// memoryFile returns the memory of a chunk's file.
func (r *deviceRig) memoryFile(mem *memfs.FS, n int) staging.Segments {
	r.t.Helper()
	var find func(dir string) string
	find = func(dir string) string {
		list, err := mem.ReadDir(dir)
		if err != nil {
			r.t.Fatal(err)
		}
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
	if err != nil {
		r.t.Fatal(err)
	}
	defer f.Close()
	s, err := staging.MemoryOf(f, 1)
	if err != nil || s == nil {
		r.t.Fatal(s == nil, err)
	}
	return s
}

// Pages on a GPU are gathered into memory and scattered from it, by kernels, without a slot.
func TestMemoryRoundTripOnDevice(t *testing.T) {
	for name, geo := range deviceShapes {
		t.Run(name, func(t *testing.T) {
			const chunks = 3
			r, _ := newMemoryRig(t, geo, geo.Blocks*chunks+3)
			ids := r.shuffled(chunks)
			var stores []StoreChunk
			for n := range chunks {
				stores = append(stores, r.put(n, ids[n]))
			}
			if read, out := r.storeAll(stores...); len(read.Failed)+len(out.Failed) > 0 {
				t.Fatal(read, out)
			}
			r.poison()
			ids = r.shuffled(chunks)
			if out := r.load([]int{0, 1, 2}, ids); len(out.Failed) > 0 {
				t.Fatal(out)
			}
			for n := range chunks {
				if err := r.holds(n, ids[n], false); err != nil {
					t.Error(err)
				}
			}
			if took := r.took(); took["memory"] != 2*chunks || len(took) != 1 {
				t.Errorf("routes taken: %v", took)
			}
			if !r.gpu.FitsWindow(1, 1) {
				t.Error("windows were given up")
			}
		})
	}
}

// Ten thousand operations on a memory root over the double, with CUDA calls failing in another way each round and now
// and then a changed byte. Every byte that was delivered is right, and no chunk but the changed one is dropped.
func TestMemoryUnderDeviceFailures(t *testing.T) {
	t.Setenv("KVHOST_TEST_GPU", "")
	r, mem := newMemoryRig(t, kv.Uniform(2, 2, 1, 4096), 32)
	faults := []string{
		"", "sums:code=1:nth=2", "cuMemcpyAsync:code=1:nth=1", "cuMemcpyAsync:code=1:nth=3", "cuLaunchKernel:code=1:nth=2",
		"cuLaunchKernel:code=701:nth=3", "cuMemcpyAsync:nth=2:flip=100", "cuStreamSynchronize:code=1:nth=1",
		"cuEventSynchronize:code=1:nth=2", "cuEventRecord:code=1:nth=2",
	}
	const batch = 8
	list := make([]int, batch)
	operations, failed, damaged := 0, 0, 0
	for round := 0; operations < 10_000; round++ {
		fault := faults[r.rng.IntN(len(faults))]
		ids := r.shuffled(batch)
		if round%10 == 0 {
			for i := range list {
				list[i] = round*batch + i
			}
			for tries, stored := 0, false; !stored; tries++ {
				var chunks []StoreChunk
				for i, n := range list {
					if l := r.lookup(n); l.Hits() == 0 {
						chunks = append(chunks, r.put(n, ids[i]))
						l.Release()
					} else {
						l.Release()
					}
				}
				if tries == 0 && !strings.Contains(fault, "flip") { // which a store cannot notice
					r.double.Rules(fault)
				}
				_, out := r.storeAll(chunks...)
				r.double.Rules("")
				operations += len(chunks)
				for _, f := range out.Failed {
					if !errors.Is(f.Err, ErrDevice) {
						t.Fatalf("fault %q: a chunk failed with %v, want ErrDevice", fault, f.Err)
					}
				}
				stored = len(out.Failed) == 0
			}
			ids = r.shuffled(batch)
		}
		r.poison()
		bad := -1
		if round%10 == 9 {
			bad = r.rng.IntN(batch)
			r.memoryFile(mem, list[bad]).From(int64(8192 + r.rng.IntN(4*4096)))[0] ^= 1
			damaged++
		}
		r.double.Rules(fault)
		out := r.load(list, ids)
		r.double.Rules("")
		operations += batch
		lost := map[int]bool{}
		for _, f := range out.Failed {
			if f.Chunk != bad && !errors.Is(f.Err, ErrDevice) {
				t.Fatalf("%q, round %d: chunk %d failed: %v", fault, round, f.Chunk, f.Err)
			}
			lost[f.Chunk] = true
			failed++
		}
		if bad >= 0 && !lost[bad] {
			t.Fatalf("round %d: the changed chunk did not fail", round)
		}
		for i, n := range list {
			if err := r.holds(n, ids[i], lost[i]); err != nil {
				t.Fatalf("%q, round %d: %v", fault, round, err)
			}
			if l := r.lookup(n); i != bad && l.Hits() != 1 {
				t.Fatalf("%q, round %d: chunk %d was dropped for an error of the GPU", fault, round, i)
			} else {
				l.Release()
			}
		}
	}
	if failed < damaged || damaged == 0 || r.engine.Stats().SlotsInUse != 0 || r.gpu.Err() != nil {
		t.Errorf("%d failed, %d damaged, %+v, %v", failed, damaged, r.engine.Stats(), r.gpu.Err())
	}
	t.Logf("%d operations, %d failed, %d of them for a changed byte", operations, failed, damaged)
}

// lookup looks one chunk up.
func (r *deviceRig) lookup(n int) *store.Lease {
	r.t.Helper()
	l, err := r.store.Lookup(store.LookupRequest{Namespace: r.space, Keys: []kv.Key{deviceKey(n)}, Ranks: 1})
	if err != nil {
		r.t.Fatal(err)
	}
	return l
}
