package transfer

import (
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// TestFlightIsToldByRoute: a piece on its way is counted on the route where it is, also when it changes that.
func TestFlightIsToldByRoute(t *testing.T) {
	t.Setenv("KVHOST_TEST_GPU", "")
	r := newDeviceRig(t, kv.Uniform(2, 2, 1, 4096), 16, 8<<20)
	r.route(RouteChoice{})
	ids := r.shuffled(1)
	r.mustStore(r.put(0, ids[0]))
	inFlight := func() map[string]int {
		out := map[string]int{}
		for _, f := range r.engine.Traffic() {
			for _, m := range f.Routes {
				if f.Kind == staging.Read {
					out[m.Route] = m.InFlight
				}
			}
		}
		return out
	}
	done := make(chan Outcome, 1)
	r.double.Rules("cuFileRead:hang")
	go func() { done <- r.load([]int{0}, ids) }()
	testenv.Until(t, "a call of cuFile", func() bool { return r.double.Calls("cuFileRead") > 0 })
	if got := inFlight(); got["direct"] != 1 || got["staged"] != 0 {
		t.Errorf("while cuFile reads: %v", got)
	}
	r.double.Rules("")
	if out := <-done; len(out.Failed) > 0 {
		t.Fatal(out)
	}
	r.double.Rules("cuFileRead:code=5030")
	r.fs.Set(faultfs.MustRules("read **.kv: hang")...)
	go func() { done <- r.load([]int{0}, ids) }()
	testenv.OK(t, r.fs.AwaitHanging(t.Context(), 1))
	if got := inFlight(); got["direct"] != 0 || got["staged"] != 1 {
		t.Errorf("while it is staged instead: %v", got)
	}
	r.fs.Release()
	r.fs.Set()
	if out := <-done; len(out.Failed) > 0 {
		t.Fatal(out)
	}
	if got, took := inFlight(), r.took(); got["direct"]+got["staged"] != 0 || took["direct"] != 2 ||
		took["staged"] != 1 {
		t.Errorf("at the end: %v, booked %v", got, took)
	}
}

// TestGPUStatsAreOfAllItsRoots: what is told of a GPU does not depend on which of its roots comes first and is staged.
func TestGPUStatsAreOfAllItsRoots(t *testing.T) {
	t.Setenv("KVHOST_TEST_GPU", "")
	r := newDeviceRig(t, kv.Uniform(2, 2, 1, 4096), 16, 8<<20)
	r.engine.SetRoute(r.gpu, "/", RouteChoice{Why: "as configured"})
	r.route(RouteChoice{})
	r.mustStore(r.put(0, r.shuffled(1)[0]))
	list := r.engine.Routes()
	if len(list) != 2 || list[0].Root != "/" || list[0].Route != "staged" || list[1].Route != "direct" {
		t.Fatalf("routes: got %+v, want / staged and the root direct", list)
	}
	for _, s := range list {
		if s.SlotBytes == 0 || s.Handles.Misses == 0 {
			t.Errorf("route without slots or opened handles: %+v", s)
		}
	}
}
