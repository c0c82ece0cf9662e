package transfer

import (
	"errors"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/kv"
)

// Thousands of chunk operations over the double on a root of files, by both routes, and on one in memory, with calls of the
// libraries failing in another way each round and now and then a changed byte. No chunk loses a block by
// what was injected under cuFile; where CUDA fails for memory, chunks fail for the device alone. What was injected in a piece fails that chunk and no
// other, every byte delivered is right, and no other entry is dropped.
func TestOperationsUnderFailures(t *testing.T) {
	testenv.Slow(t)
	geo := kv.Uniform(2, 2, 1, 4096)
	t.Run("files", func(t *testing.T) {
		t.Setenv("KVHOST_TEST_GPU", "")
		r := newDeviceRig(t, geo, 32, 16<<20)
		faults := []string{
			"", "cuFileRead:errno=5:nth=2", "cuFileRead:code=5030:from=3", "cuFileRead:short=4096:nth=1",
			"cuFileRead:flip=9000:nth=4",
			"cuFileHandleRegister:code=5027:from=2", "cuFileRead:delay=1:nth=3",
			"sums:code=701:nth=3",
			"cuFileWrite:errno=28:nth=1", "cuFileWrite:short=0:from=2", "cuMemAlloc_v2:code=2",
		}
		change := func(n int, at int64) { ChangeByte(t, r.path(n), at, 1) }
		r.underFailures(faults, nil, change, func(round int) {
			if round%50 == 0 {
				r.route(RouteChoice{Always: round%100 == 0})
			}
		})
		if r.stats().SlotsInUse != 0 {
			t.Errorf("slots of the route are held: %+v", r.stats())
		}
	})
	t.Run("memory", func(t *testing.T) {
		t.Setenv("KVHOST_TEST_GPU", "")
		r, mem := newMemoryRig(t, geo, 32)
		faults := []string{
			"", "sums:code=1:nth=2", "cuMemcpyAsync:code=1:nth=1", "cuMemcpyAsync:code=1:nth=3", "cuLaunchKernel:code=1:nth=2",
			"cuLaunchKernel:code=701:nth=3", "cuMemcpyAsync:nth=2:flip=100", "cuStreamSynchronize:code=1:nth=1",
			"cuEventSynchronize:code=1:nth=2", "cuEventRecord:code=1:nth=2",
		}
		change := func(n int, at int64) { r.memoryFile(mem, n).From(at)[0] ^= 1 }
		r.underFailures(faults, ErrDevice, change, func(int) {})
		if r.gpu.Err() != nil {
			t.Errorf("the GPU is lost: %v", r.gpu.Err())
		}
	})
}

// underFailures stores and loads batches under faults. may is how chunks may fail for them, if they may at all.
func (r *deviceRig) underFailures(faults []string, may error, change func(n int, at int64), before func(round int)) {
	r.t.Helper()
	const batch = 8
	list := make([]int, batch)
	operations, failed, damaged := 0, 0, 0
	judge := func(fault string, failures []ChunkError, bad int) map[int]bool {
		lost := map[int]bool{}
		for _, f := range failures {
			if f.Chunk != bad && (may == nil || !errors.Is(f.Err, may)) {
				r.t.Fatalf("fault %q: chunk %d failed with %v, want %v", fault, f.Chunk, f.Err, may)
			}
			lost[f.Chunk] = true
		}
		return lost
	}
	for round := 0; operations < 4_000; round++ {
		before(round)
		fault := faults[r.rng.IntN(len(faults))]
		ids := r.shuffled(batch)
		if round%10 == 0 { // new chunks, stored while calls fail
			for i := range list {
				list[i] = round*batch + i
			}
			for tries, stored := 0, false; !stored; tries++ {
				var chunks []StoreChunk
				for i, n := range list {
					if r.hits(n) == 0 {
						chunks = append(chunks, r.put(n, ids[i]))
					}
				}
				if tries == 0 && (may == nil || !strings.Contains(fault, "flip")) { // which a copy into memory cannot notice
					r.double.Rules(fault)
				}
				_, out := r.storeAll(chunks...)
				r.double.Rules("")
				operations += len(chunks)
				judge(fault, out.Failed, -1)
				stored = len(out.Failed) == 0
			}
			ids = r.shuffled(batch)
		}
		r.poison()
		bad := -1
		if round%10 == 9 {
			bad = r.rng.IntN(batch)
			change(list[bad], int64(8192+r.rng.IntN(4*4096)))
			damaged++
		}
		r.double.Rules(fault)
		out := r.load(list, ids)
		r.double.Rules("")
		operations += batch
		failed += len(out.Failed)
		lost := judge(fault, out.Failed, bad)
		if bad >= 0 && !lost[bad] {
			r.t.Fatalf("round %d: the changed chunk did not fail", round)
		}
		for i, n := range list {
			if err := r.holds(n, ids[i], lost[i]); err != nil {
				r.t.Fatalf("%q, round %d: %v", fault, round, err)
			}
			if i != bad && r.hits(n) != 1 {
				r.t.Fatalf("%q, round %d: chunk %d was dropped for an error of a library", fault, round, i)
			}
		}
	}
	if failed < damaged || damaged == 0 || r.engine.Stats().SlotsInUse != 0 {
		r.t.Errorf("%d failed, %d damaged, %+v", failed, damaged, r.engine.Stats())
	}
	r.t.Logf("%d operations, %d failed, %d of them for a changed byte", operations, failed, damaged)
}

// TestCompressedOperationsUnderFailures stores, loads whole and by layers, and deletes compressed chunks of a GPU, four
// thousand in all, and on a GPU ten thousand on each route, of three models, while calls fail. No byte that is
// delivered is wrong, and a chunk fails only if the GPU's calls do, however it is tried. With KVHOST_TEST_GPU set the
// faults are those of a proxy before the library; pages then have the sizes of models.
func TestCompressedOperationsUnderFailures(t *testing.T) {
	testenv.Slow(t)
	faults := []string{
		"", "encode:nth=2:code=1", "pack:nth=1:code=1", "decode:nth=2:code=1", "join:nth=3:code=1", "sums:nth=4:code=1",
		"pages:nth=2:code=1", "cuMemcpyAsync:nth=1:code=1", "cuMemcpyAsync:nth=4:code=1", "cuLaunchKernel:nth=3:code=701",
		"cuEventSynchronize:nth=2:code=1", "join:nth=2:flip=77", "encode:nth=3:code=1,decode:nth=3:code=1",
		"cuFileRead:nth=2:code=5030", "cuFileWrite:nth=3:short=8192", "cuFileRead:nth=2:flip=70000",
	}
	for name, model := range map[string]struct {
		dtype      string
		geo, small kv.Geometry
	}{
		"llama": {"bf16", kv.Uniform(4, 8, 2, 32<<10), kv.Uniform(2, 2, 2, 4096)},
		"MLA":   {"bf16", kv.Uniform(4, 12, 1, 18432), kv.Uniform(2, 3, 1, 4608)},
		"fp8":   {"fp8_e4m3", kv.Uniform(4, 8, 2, 16<<10), kv.Uniform(2, 2, 2, 2304)},
	} {
		for _, route := range []string{"direct", "staged", "memory"} {
			t.Run(name+" "+route, func(t *testing.T) {
				const batch = 6
				geo, share := model.small, 4_000/9
				if os.Getenv("KVHOST_TEST_GPU") != "" {
					geo, share = model.geo, 10_000/3
				}
				var r *deviceRig
				switch blocks := 2 * geo.Blocks * batch; route {
				case "direct":
					r = newCompressedRig(t, model.dtype, geo, blocks)
					r.route(RouteChoice{Always: true})
				case "staged":
					r = newCompressedRig(t, model.dtype, geo, blocks)
				case "memory":
					r, _ = newMemoryRigOf(t, model.dtype, geo, blocks, compressed)
					r.float = true
				}
				var list []int
				operations, failed := 0, 0
				for round := 0; operations < share; round++ {
					fault := faults[r.rng.IntN(len(faults))]
					if round%3 == 0 { // new chunks in place of the old
						operations += len(list) + batch
						r.discard(list)
						ids := r.shuffled(batch)
						var chunks []StoreChunk
						list = list[:0]
						for i := range batch {
							list = append(list, round*batch+i)
							chunks = append(chunks, r.put(list[i], ids[i]))
						}
						r.rules(fault)
						_, out := r.storeAll(chunks...)
						r.rules("")
						failed += len(out.Failed)
						for _, f := range out.Failed {
							if !errors.Is(f.Err, ErrDevice) {
								t.Fatalf("%q: stored: %v", fault, f.Err)
							}
							list[f.Chunk] = -1
						}
						list = slices.DeleteFunc(list, func(n int) bool { return n < 0 })
					}
					var by *Layers
					if round%2 == 0 {
						by = &Layers{}
					}
					r.poison()
					ids := r.shuffled(batch)
					r.rules(fault)
					out := r.loadTo(r.queue, r.memory, list, ids[:len(list)], by)
					r.rules("")
					operations += len(list)
					failed += len(out.Failed)
					bad := map[int]bool{}
					for _, f := range out.Failed {
						if bad[f.Chunk] = true; !errors.Is(f.Err, ErrDevice) {
							t.Fatalf("%q: loaded: %v", fault, f.Err)
						}
					}
					for i, n := range list {
						if err := r.holds(n, ids[i], bad[i]); err != nil {
							t.Fatalf("%q, round %d: %v", fault, round, err)
						}
					}
				}
				s, took := r.store.Compression()[0], r.took()
				t.Logf("%d operations, %d chunks failed; %d page bytes encoded to %d, %d decoded; by route %v; the GPU's codec is still used: %v",
					operations, failed, s.Encoded.Pages, s.Encoded.Stored, s.Decoded.Pages, took, r.gpu.FitsCoder(1, 1))
				if took[route] == 0 {
					t.Errorf("by route %v, want some by %s", took, route)
				}
				if failed > operations/20 {
					t.Errorf("%d of %d operations failed", failed, operations)
				}
				if r.double != nil && !r.gpu.FitsCoder(1, 1) {
					t.Error("failures now and then made the host leave the GPU's codec")
				}
				if r.double != nil {
					broken := "encode:every=1:code=1,decode:every=1:code=1"
					if route == "memory" { // wrong bytes, which the processor finds
						broken = "join:flip=3000"
					}
					r.rules(broken)
					for n := range 8 {
						if out := r.load(list, r.shuffled(batch)[:len(list)]); len(out.Failed) > 0 || n == 7 && r.gpu.FitsCoder(1, 1) {
							t.Errorf("a codec that fails each time is still used: %v, failed: %+v", r.gpu.FitsCoder(1, 1), out.Failed)
						}
					}
					r.rules("")
				}
				if s.Encoded.Pages == 0 || s.Decoded.Pages == 0 || r.engine.Stats().SlotsInUse != 0 {
					t.Errorf("codec has %+v and engine %+v, want pages encoded and decoded and no slot in use", s, r.engine.Stats())
				}
			})
		}
	}
}

// discard deletes chunks.
func (r *deviceRig) discard(list []int) {
	r.t.Helper()
	var keys []kv.Key
	for _, n := range list {
		keys = append(keys, deviceKey(n))
	}
	results, err := r.store.Discard(store.DiscardRequest{Namespace: r.space, Keys: keys})
	testenv.OK(r.t, err)
	for i, is := range results {
		if is != store.DiscardRemoved {
			r.t.Fatalf("chunk %d: result %d of its deletion", list[i], is)
		}
	}
}
