package peers

import (
	"context"
	"runtime"
	"sync"
	"time"
)

// effortSlack is the estimated time that a caller may be ahead of its part. What a caller sends in a short burst does not wait.
const effortSlack = 5 * time.Millisecond

// effort limits the processor time that the arrivals of each caller take, before gRPC sees them: calls of any kind, messages that
// cannot be decoded, and frames that belong to no call. The time is an estimate ([arrivals.Conn]). A caller has the part of the
// processors that its lease requests have, and all callers together that are not configured have twice as much.
type effort struct {
	part float64 // processors of one caller

	mu        sync.Mutex
	of        map[caller]*spent
	strangers time.Time // like spent.until, of all callers that are not configured
}

// spent is what a caller has used of its part.
type spent struct {
	turn  chan struct{} // has an element while the caller waits, so that it has one place among the strangers
	users int
	until time.Time // end of the time that its arrivals take at its part of the processors
}

func newEffort() effort {
	return effort{part: float64(runtime.GOMAXPROCS(0)) / 2 / (1 + askRest), of: map[caller]*spent{}}
}

// spend charges a caller for an estimated time and waits until it has made up for it.
func (e *effort) spend(ctx context.Context, who caller, took time.Duration) {
	e.mu.Lock()
	x := e.of[who]
	if x == nil {
		x = &spent{turn: make(chan struct{}, 1)}
		e.of[who] = x
	}
	x.users++
	e.mu.Unlock()
	x.turn <- struct{}{}
	defer func() { <-x.turn }()
	e.mu.Lock()
	now := time.Now()
	wait := owes(&x.until, now, time.Duration(float64(took)/e.part))
	if !who.known {
		wait = max(wait, owes(&e.strangers, now, time.Duration(float64(took)/e.part/2)))
	}
	x.users--
	e.mu.Unlock()
	if wait <= effortSlack {
		return
	}
	over := time.NewTimer(wait)
	defer over.Stop()
	select {
	case <-over.C:
	case <-ctx.Done():
	}
}

// owes adds to the time until which something is used, and returns how far away that is.
func owes(until *time.Time, now time.Time, more time.Duration) time.Duration {
	if until.Before(now) {
		*until = now
	}
	*until = until.Add(more)
	return until.Sub(now)
}

// tidy forgets callers that have made up for all that they used.
func (e *effort) tidy(now time.Time) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for who, x := range e.of {
		if x.users == 0 && x.until.Before(now) {
			delete(e.of, who)
		}
	}
}
