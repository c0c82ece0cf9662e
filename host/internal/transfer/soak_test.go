package transfer

import (
	"errors"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/host/kv"
)

// Ten thousand chunk operations over the double on a root of files, by both routes, and on one in memory, with calls of the
// libraries failing in another way each round and now and then a changed byte. No chunk loses a block by
// what was injected under cuFile; where CUDA fails for memory, chunks fail for the device alone. What was injected in a piece fails that chunk and no
// other, every byte delivered is right, and no other entry is dropped.
func TestTenThousandOperationsUnderFailures(t *testing.T) {
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
	for round := 0; operations < 10_000; round++ {
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
