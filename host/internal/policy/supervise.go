package policy

import (
	"context"
	"time"
)

// A policy that fails repeatedly has a bug that restarts do not cure. Each restart costs an instance, a replay of the
// residents, and decisions by the built-in policy.
const (
	firstPause  = 100 * time.Millisecond // doubled by each remembered fault
	faultWindow = 10 * time.Minute
	maxFaults   = 6 // remembered faults; the last one ends the restarts
)

// Backoff decides whether and when a failed guest is restarted. It is not safe for concurrent use.
type Backoff struct {
	// Window is the time for which a fault is remembered; 0: for ever.
	Window time.Duration
	faults []time.Time
}

// Failed records a fault and returns the pause before the restart. ok is false if there were too many faults.
func (b *Backoff) Failed(now time.Time) (pause time.Duration, ok bool) {
	for b.Window > 0 && len(b.faults) > 0 && now.Sub(b.faults[0]) > b.Window {
		b.faults = b.faults[1:]
	}
	b.faults = append(b.faults, now)
	return firstPause << (len(b.faults) - 1), len(b.faults) < maxFaults
}

// Faults is the number of faults that are remembered.
func (b *Backoff) Faults() int { return len(b.faults) }

// Supervise restarts a failed guest: it waits for the pause and calls start, and repeats both after each error of start
// for which failed returns [Restart]. It returns when start succeeds, when failed returns another verdict, or when the
// context is done.
func Supervise(ctx context.Context, pause time.Duration, start func(context.Context) error,
	failed func(error) (Verdict, time.Duration)) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
		err := start(ctx)
		if err == nil || ctx.Err() != nil {
			return
		}
		var verdict Verdict
		if verdict, pause = failed(err); verdict != Restart {
			return
		}
	}
}
