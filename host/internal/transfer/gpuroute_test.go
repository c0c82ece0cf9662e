package transfer

import (
	"errors"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// Operations that were begun before the route was left end later: neither do they take it up again, nor do they end
// the probe.
func TestOnlyTheTrialDecidesAboutARouteThatWasLeft(t *testing.T) {
	now := time.Unix(1000, 0)
	r := &gpuRoute{log: slog.New(slog.DiscardHandler), now: func() time.Time { return now }}
	broken := errors.New("broken")
	var before []attempt
	for range 4 {
		before = append(before, r.attempt())
	}
	r.attempt().failed(&r.loadFallbacks, broken, true)
	before[0].succeeded(&r.loads, 1)
	if r.active() || r.attempt().gpuRoute != nil {
		t.Fatal("an operation begun before took the route up again")
	}
	now = now.Add(firstSuspension)
	probe := r.attempt()
	if probe.gpuRoute == nil || !probe.probe {
		t.Fatal("no probe is given")
	}
	before[1].failed(&r.loadFallbacks, broken, true)
	before[2].succeeded(&r.loads, 1)
	before[3].skipped(nil)
	if r.active() || r.attempt().gpuRoute != nil || r.suspended.Load() != 1 {
		t.Fatal("an operation begun before ended the probe")
	}
	probe.succeeded(&r.loads, 1)
	if !r.active() || r.resumed.Load() != 1 || r.loads.Load() != 3 {
		t.Fatalf("the probe did not take the route up: %d returns, %d loads", r.resumed.Load(), r.loads.Load())
	}
}

// A route that is wanted always is left for what does not end alone.
func TestAlwaysIsLeftForWhatHangs(t *testing.T) {
	now := time.Unix(1000, 0)
	r := &gpuRoute{choice: RouteChoice{Always: true}, log: slog.New(slog.DiscardHandler),
		now: func() time.Time { return now }}
	for range 2 * failuresToSuspend {
		r.attempt().failed(&r.loadFallbacks, errors.New("broken"), true)
	}
	if !r.active() || r.suspended.Load() != 0 {
		t.Fatalf("left %d times", r.suspended.Load())
	}
	r.attempt().failed(&r.loadFallbacks, gds.ErrHung, true)
	if r.active() || r.suspended.Load() != 1 {
		t.Fatal("it is not left")
	}
	now = now.Add(firstSuspension)
	r.attempt().succeeded(&r.loads, 1)
	if !r.active() {
		t.Fatal("it is not taken up again")
	}
}

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
	testenv.OK(t, r.fs.AwaitHanging(testenv.Context(t), 1))
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

// TestHungCuFileIsGivenUp: cuFile does not return. A load is staged and arrives whole, a store fails and leaves no
// piece; the route is left at once, also where it is wanted always; slot and thread come back when the call does.
func TestHungCuFileIsGivenUp(t *testing.T) {
	for _, always := range []bool{false, true} {
		t.Run(fmt.Sprint(always), func(t *testing.T) { hang(t, always) })
	}
}

func hang(t *testing.T, always bool) {
	t.Setenv("KVHOST_TEST_GPU", "")
	r := newDeviceRig(t, kv.Uniform(4, 4, 1, 100_000), 64, 32<<20)
	from := r.shuffled(2)
	r.mustStore(r.put(0, from[0]))
	limited, err := gds.NewDirectRoute(r.gpu, r.direct.CuFile(),
		gds.DirectConfig{BufferBytes: 32 << 20, Limit: time.Second})
	testenv.OK(t, err)
	settled := func() {
		t.Helper()
		r.double.Rules("")
		testenv.Until(t, "no call hangs, and no slot is in use", func() bool { return r.stats().Hung == 0 && r.stats().SlotsInUse == 0 },
			func() any { return r.stats() })
	}
	t.Cleanup(func() {
		testenv.NoError(t, limited.Close())
	})
	r.route(RouteChoice{Direct: limited, Always: always})
	ids := r.shuffled(1)
	r.poison()
	r.double.Rules("cuFileRead:hang")
	r.mustLoad([]int{0}, ids)
	if s := r.stats(); s.LoadFallbacks != 1 || s.Suspended != 1 || s.Route != "staged" || s.Hung != 1 ||
		s.SlotsInUse != 1 {
		t.Errorf("always %v: %+v", always, s)
	}
	if out := r.load([]int{0}, ids); len(out.Failed) > 0 || r.stats().LoadFallbacks != 1 { // not tried
		t.Errorf("always %v: %v, %+v", always, out.Failed, r.stats())
	}
	settled()
	testenv.NoError(t, r.holds(0, ids[0], false))

	r.route(RouteChoice{Direct: limited, Always: always})
	last := r.put(1, from[1])
	r.double.Rules("cuFileWrite:hang")
	read, out := r.storeAll(last)
	if len(read.Failed) > 0 || len(out.Failed) != 1 || !errors.Is(out.Failed[0].Err, gds.ErrHung) {
		t.Errorf("always %v: %v, %v", always, read, out)
	}
	if s := r.stats(); s.StoresHung != 1 || s.StoreFallbacks != 0 || s.Route != "staged" || s.Hung != 1 ||
		s.SlotsInUse != 1 {
		t.Errorf("always %v: %+v", always, s)
	}
	settled()
	l, err := r.store.Lookup(store.LookupRequest{Namespace: r.space, Keys: []kv.Key{deviceKey(1)}, Ranks: 1})
	if err != nil || l.Hits() != 0 {
		t.Errorf("a piece was published: %d hits, %v", l.Hits(), err)
	}
	l.Release()
}
