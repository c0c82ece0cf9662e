package transfer

import (
	"errors"
	"os"
	"slices"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/kv"
)

// TestTenThousandCompressedOperations stores, loads whole and by layers, and deletes compressed chunks of a GPU, ten
// thousand in all, and on a GPU on each route, of three models, while calls fail. No byte that is
// delivered is wrong, and a chunk fails only if the GPU's calls do, however it is tried. With KVHOST_TEST_GPU set the
// faults are those of a proxy before the library; pages then have the sizes of models.
func TestTenThousandCompressedOperations(t *testing.T) {
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
				geo, share := model.small, 10_000/9
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
