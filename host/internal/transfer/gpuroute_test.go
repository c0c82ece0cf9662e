package transfer

import (
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/kvhost/kvhost/gds"
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
