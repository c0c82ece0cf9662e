package transfer

import (
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/kvhost/kvhost/gds"
)

// Operations that were begun before the route was left end later: neither do they take it up again, nor do they end the trial.
func TestOnlyTheTrialDecidesAboutARouteThatWasLeft(t *testing.T) {
	now := time.Unix(1000, 0)
	r := &route{log: slog.New(slog.DiscardHandler), now: func() time.Time { return now }}
	broken := errors.New("broken")
	var before []attempt
	for range 4 {
		before = append(before, r.take())
	}
	r.take().failed(&r.loadsAgain, broken, true)
	before[0].worked(&r.loads, 1)
	if r.inForce() || r.take().route != nil {
		t.Fatal("an operation begun before took the route up again")
	}
	now = now.Add(firstLeave)
	trial := r.take()
	if trial.route == nil || !trial.trial {
		t.Fatal("no trial is given")
	}
	before[1].failed(&r.loadsAgain, broken, true)
	before[2].worked(&r.loads, 1)
	before[3].passed()
	if r.inForce() || r.take().route != nil || r.left.Load() != 1 {
		t.Fatal("an operation begun before ended the trial")
	}
	trial.worked(&r.loads, 1)
	if !r.inForce() || r.returned.Load() != 1 || r.loads.Load() != 3 {
		t.Fatalf("the trial did not take the route up: %d returns, %d loads", r.returned.Load(), r.loads.Load())
	}
}

// A route that is wanted always is left for what does not end alone.
func TestAlwaysIsLeftForWhatHangs(t *testing.T) {
	now := time.Unix(1000, 0)
	r := &route{choice: RouteChoice{Always: true}, log: slog.New(slog.DiscardHandler), now: func() time.Time { return now }}
	for range 2 * failuresToLeave {
		r.take().failed(&r.loadsAgain, errors.New("broken"), true)
	}
	if !r.inForce() || r.left.Load() != 0 {
		t.Fatalf("left %d times", r.left.Load())
	}
	r.take().failed(&r.loadsAgain, gds.ErrHung, true)
	if r.inForce() || r.left.Load() != 1 {
		t.Fatal("it is not left")
	}
	now = now.Add(firstLeave)
	r.take().worked(&r.loads, 1)
	if !r.inForce() {
		t.Fatal("it is not taken up again")
	}
}
