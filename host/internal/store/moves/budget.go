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

// budget is what moves may take of the machine.
type budget struct {
	loads     *Loads
	perSecond int64       // bytes; 0: as many as go
	hurry     atomic.Bool // no more loads come: there is no other limit than time

	mu   sync.Mutex
	free time.Time // when what was taken has been paid for
}

// burst is how far the budget may be behind: what is not used in that time is lost.
const burst = 50 * time.Millisecond

// yield waits until no load is under way, but not for long.
func (b *budget) yield(ctx context.Context) error {
	if !b.hurry.Load() {
		if idle := b.loads.none(); idle != nil {
			return wait(ctx, patience, idle)
		}
	}
	return ctx.Err()
}

// take waits until so many bytes may be moved.
func (b *budget) take(ctx context.Context, n int) error {
	if b.hurry.Load() || b.perSecond == 0 {
		return ctx.Err()
	}
	return wait(ctx, b.pay(time.Now(), n), nil)
}

// pay books bytes and returns how long they have to wait.
func (b *budget) pay(now time.Time, n int) time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	if earliest := now.Add(-burst); b.free.Before(earliest) {
		b.free = earliest
	}
	due := b.free
	b.free = b.free.Add(time.Duration(float64(n) / float64(b.perSecond) * float64(time.Second)))
	return due.Sub(now)
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
