package moves

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// patience is the longest time that a part waits for loads, so that moves end under any load.
const patience = 20 * time.Millisecond

// Loads counts the running loads. It is safe for concurrent use.
type Loads struct {
	n      atomic.Int64
	mu     sync.Mutex
	idle   chan struct{} // closed when the last load ends; nil if no move waits
	waited atomic.Bool   // a move is waiting
}

// Begin counts a load.
func (l *Loads) Begin() { l.n.Add(1) }

// End ends a load.
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

// none returns a channel that is closed when no load is running, or nil if none is running now.
func (l *Loads) none() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.idle == nil {
		l.idle = make(chan struct{})
	}
	l.waited.Store(true)
	if l.n.Load() == 0 {
		return nil // the end of the next load closes a channel for which no move waits
	}
	return l.idle
}

// Await waits until no load is running, but no longer than most.
func (l *Loads) Await(ctx context.Context, most time.Duration) error {
	if idle := l.none(); idle != nil {
		return wait(ctx, most, idle)
	}
	return ctx.Err()
}

// UnderWay reports whether a load is running.
func (l *Loads) UnderWay() bool { return l.n.Load() > 0 }

// Rate limits the bytes a second that are moved. A part begins when all parts before it are paid for. It is safe for concurrent
// use.
type Rate struct {
	PerSecond int64 // bytes; 0 means no limit

	mu   sync.Mutex
	free time.Time // time at which all bytes taken so far are paid for
}

// burst is the most unused time that a rate can catch up.
const burst = 50 * time.Millisecond

// Take waits until n bytes may be moved.
func (r *Rate) Take(ctx context.Context, n int) error {
	if r.PerSecond <= 0 {
		return ctx.Err()
	}
	return wait(ctx, r.pay(time.Now(), n), nil)
}

// pay books bytes and returns the time that they must wait.
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

// budget limits the use of the machine by moves.
type budget struct {
	loads *Loads
	rate  Rate
	hurry atomic.Bool // there will be no more loads, so only the time is limited
}

// yield waits until no load is running, but for a limited time.
func (b *budget) yield(ctx context.Context) error {
	if b.hurry.Load() {
		return ctx.Err()
	}
	return b.loads.Await(ctx, patience)
}

// take waits until n bytes may be moved.
func (b *budget) take(ctx context.Context, n int) error {
	if b.hurry.Load() {
		return ctx.Err()
	}
	return b.rate.Take(ctx, n)
}

// wait waits for a time or until a channel is closed.
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
