package moves

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// patience is how long a part waits for loads at most, so that moves come to an end under any load.
const patience = 20 * time.Millisecond

// Loads counts the loads that are under way. It is safe for concurrent use.
type Loads struct {
	n      atomic.Int64
	mu     sync.Mutex
	idle   chan struct{} // closed when the last load ends; nil: no move waits
	waited atomic.Bool   // a move waits
}

// Begin counts a load.
func (l *Loads) Begin() { l.n.Add(1) }

// End ends Begin.
func (l *Loads) End() {
	if l.n.Add(-1) != 0 || !l.waited.Load() {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.idle != nil {
		close(l.idle)
		l.idle = nil
		l.waited.Store(false)
	}
}

// none returns a channel that is closed when no load is under way, or nil when none is now.
func (l *Loads) none() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.idle == nil {
		l.idle = make(chan struct{})
	}
	l.waited.Store(true)
	if l.n.Load() == 0 {
		return nil // the end of the next load closes a channel that no move waits for
	}
	return l.idle
}

// Await waits until no load is under way, or for so long.
func (l *Loads) Await(ctx context.Context, most time.Duration) error {
	if idle := l.none(); idle != nil {
		return wait(ctx, most, idle)
	}
	return ctx.Err()
}

// UnderWay says whether a load is.
func (l *Loads) UnderWay() bool { return l.n.Load() > 0 }

// Rate spreads what is moved over time: a part begins when those before it would have ended. It is safe for concurrent use.
type Rate struct {
	PerSecond int64 // bytes; 0: as many as go

	mu   sync.Mutex
	free time.Time // when what was taken has been paid for
}

// burst is how far a rate may be behind: what is not used in that time is lost.
const burst = 50 * time.Millisecond

// Take waits until so many bytes may be moved.
func (r *Rate) Take(ctx context.Context, n int) error {
	if r.PerSecond <= 0 {
		return ctx.Err()
	}
	return wait(ctx, r.pay(time.Now(), n), nil)
}

// pay books bytes and returns how long they have to wait.
func (r *Rate) pay(now time.Time, n int) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	if earliest := now.Add(-burst); r.free.Before(earliest) {
		r.free = earliest
	}
	due := r.free
	r.free = r.free.Add(time.Duration(float64(n) / float64(r.PerSecond) * float64(time.Second)))
	return due.Sub(now)
}

// budget is what moves may take of the machine.
type budget struct {
	loads *Loads
	rate  Rate
	hurry atomic.Bool // no more loads come: there is no other limit than time
}

// yield waits until no load is under way, but not for long.
func (b *budget) yield(ctx context.Context) error {
	if b.hurry.Load() {
		return ctx.Err()
	}
	return b.loads.Await(ctx, patience)
}

// take waits until so many bytes may be moved.
func (b *budget) take(ctx context.Context, n int) error {
	if b.hurry.Load() {
		return ctx.Err()
	}
	return b.rate.Take(ctx, n)
}

// wait waits for a time, or until a channel is closed.
func wait(ctx context.Context, d time.Duration, closed <-chan struct{}) error {
	if d <= 0 {
		return ctx.Err()
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-closed:
	case <-t.C:
	}
	return nil
}
