package transfer

import (
	"os"
	"testing"

	"github.com/kvhost/kvhost/host/kv"
)

// damage changes a byte of a chunk's file.
func (r *deviceRig) damage(n int) {
	r.t.Helper()
	f, err := os.OpenFile(r.path(n), os.O_RDWR, 0)
	if err != nil {
		r.t.Fatal(err)
	}
	defer f.Close()
	b := make([]byte, 1)
	at := int64(8192 + r.rng.IntN(4*4096))
	if _, err := f.ReadAt(b, at); err != nil {
		r.t.Fatal(err)
	}
	b[0] ^= 1
	if _, err := f.WriteAt(b, at); err != nil {
		r.t.Fatal(err)
	}
}

// TestTenThousandOperationsUnderFailures takes 10,000 chunk operations over the double, both routes, with cuFile
// failing in another way each round and now and then a damaged file: what was injected under cuFile costs nobody a
// block, what was injected in a file fails that chunk and no other, and every byte delivered is right.
func TestTenThousandOperationsUnderFailures(t *testing.T) {
	t.Setenv("KVHOST_TEST_GPU", "")
	r := newDeviceRig(t, kv.Uniform(2, 2, 1, 4096), 32, 16<<20)
	faults := []string{
		"", "cuFileRead:errno=5:nth=2", "cuFileRead:code=5030:from=3", "cuFileRead:short=4096:nth=1",
		"cuFileRead:flip=9000:nth=4",
		"cuFileHandleRegister:code=5027:from=2", "cuFileRead:delay=1:nth=3",
		"sums:code=701:nth=3",
		"cuFileWrite:errno=28:nth=1", "cuFileWrite:short=0:from=2", "cuMemAlloc_v2:code=2",
	}
	const batch = 8
	list := make([]int, batch)
	operations, failed := 0, 0
	for round := 0; operations < 10_000; round++ {
		if round%50 == 0 {
			r.route(RouteChoice{Always: round%100 == 0})
		}
		fault := faults[r.rng.IntN(len(faults))]
		ids := r.shuffled(batch)
		if round%10 == 0 { // new chunks, stored while cuFile fails
			var chunks []StoreChunk
			for i := range list {
				list[i] = round*batch + i
				chunks = append(chunks, r.put(list[i], ids[i]))
			}
			r.double.Rules(fault)
			if read, out := r.storeAll(chunks...); len(read.Failed)+len(out.Failed) > 0 {
				t.Fatal(fault, read, out)
			}
			operations += batch
			ids = r.shuffled(batch)
		}
		r.double.Rules("")
		r.poison()
		bad := -1
		if round%10 == 9 {
			bad = r.rng.IntN(batch)
			r.damage(list[bad])
		}
		r.double.Rules(fault)
		out := r.load(list, ids)
		r.double.Rules("")
		operations += batch
		for _, f := range out.Failed {
			if f.Chunk != bad {
				t.Fatalf("%q, round %d: chunk %d failed: %v", fault, round, f.Chunk, f.Err)
			}
			failed++
		}
		if bad >= 0 && len(out.Failed) != 1 {
			t.Fatalf("round %d: the damaged chunk did not fail", round)
		}
		for i, n := range list {
			if err := r.holds(n, ids[i], i == bad); err != nil {
				t.Fatalf("%q, round %d: %v", fault, round, err)
			}
		}
	}
	if failed == 0 || r.engine.Stats().SlotsInUse != 0 || r.stats().SlotsInUse != 0 {
		t.Errorf("%d failed, %+v", failed, r.stats())
	}
}
