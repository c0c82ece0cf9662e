package arrivals

import (
	"context"
	"maps"
	"runtime"
	"sync"
	"time"
)

const (
	// effortSlack is the estimated time that a sender may be ahead of its part. What a sender sends in a short burst does not wait.
	effortSlack = 5 * time.Millisecond
	// mostDebt is the longest time that a sender may be ahead by arrivals that have not waited.
	mostDebt = time.Second
	// fewSenders are remembered even if they have made up for all that they used.
	fewSenders = 64
)

// Sender identifies who sends on a connection.
type Sender struct {
	ID    string
	Crowd string // senders that are limited together as well; empty: none
}

// Effort limits the processor time that the arrivals of each sender take, before gRPC sees them: calls of any kind, messages that
// cannot be decoded, and frames that belong to no call. The time is an estimate ([Conn]). All senders of a crowd together have
// twice the part of one.
type Effort struct {
	Part float64 // processors of one sender

	mu   sync.Mutex
	of   map[Sender]*spent // a crowd is a sender without an ID
	kept int               // senders after those were forgotten that have made up for all that they used
}

// spent is what a sender has used of its part.
type spent struct {
	turn  chan struct{} // has an element while the sender waits
	users int
	until time.Time // end of the time that its arrivals take at its part of the processors
	queue Queue     // of a crowd: its senders that wait
}

// NewEffort gives a sixteenth of the processors to each sender.
func NewEffort() *Effort { return &Effort{Part: float64(runtime.GOMAXPROCS(0)) / 16} }

// Spend charges a sender for an estimated time and waits until the sender has made up for it, or the context is done. It returns
// how long that takes.
func (e *Effort) Spend(ctx context.Context, who Sender, took time.Duration) (wait time.Duration) {
	e.mu.Lock()
	x := e.spent(who)
	x.users++
	e.mu.Unlock()
	select {
	case x.turn <- struct{}{}:
		defer func() { <-x.turn }()
	case <-ctx.Done():
	}
	since := time.Now()
	if who.Crowd != "" && ctx.Err() == nil { // what does not wait is not the crowd's debt
		e.waitInCrowd(ctx, who, took)
	}
	e.mu.Lock()
	now := time.Now()
	wait = max(0, owes(&x.until, since, time.Duration(float64(took)/e.Part))-now.Sub(since))
	if ctx.Err() != nil { // it does not wait, so the debt must not grow without end
		wait = min(wait, mostDebt)
		x.until = now.Add(wait)
	}
	x.users--
	e.mu.Unlock()
	if wait > effortSlack {
		rest(ctx, wait)
	}
	return wait
}

// waitInCrowd charges a sender's crowd as well and waits until the crowd has made up for it. Other senders of it may wait, too: the one
// that has sent least is first.
func (e *Effort) waitInCrowd(ctx context.Context, who Sender, took time.Duration) {
	var wait time.Duration
	e.mu.Lock()
	crowd := e.spent(Sender{Crowd: who.Crowd})
	crowd.users++
	e.mu.Unlock()
	err := crowd.queue.Enter(ctx, who.ID)
	e.mu.Lock()
	crowd.users--
	if err == nil {
		wait = owes(&crowd.until, time.Now(), time.Duration(float64(took)/e.Part/2))
	}
	e.mu.Unlock()
	if err != nil {
		return
	}
	rest(ctx, wait-effortSlack) // not for all of the debt, as the next may have sent nothing for long
	crowd.queue.Leave(who.ID, took)
}

// rest waits for a time, or until the context is done.
func rest(ctx context.Context, d time.Duration) {
	if d <= 0 {
		return
	}
	over := time.NewTimer(d)
	defer over.Stop()
	select {
	case <-over.C:
	case <-ctx.Done():
	}
}

// spent returns the record of a sender. The mutex must be held.
func (e *Effort) spent(who Sender) *spent {
	if x := e.of[who]; x != nil {
		return x
	}
	if now := time.Now(); e.of == nil {
		e.of = map[Sender]*spent{}
	} else if len(e.of) >= 2*e.kept+fewSenders {
		maps.DeleteFunc(e.of, func(_ Sender, x *spent) bool { return x.users == 0 && x.until.Before(now) })
		e.kept = len(e.of)
	}
	x := &spent{turn: make(chan struct{}, 1)}
	e.of[who] = x
	return x
}

// owes adds to the time until which something is used, and returns how far away that is.
func owes(until *time.Time, now time.Time, more time.Duration) time.Duration {
	if until.Before(now) {
		*until = now
	}
	*until = until.Add(more)
	return until.Sub(now)
}
