package fsck

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// limit spreads reads over time: each read begins when those before it would have ended at the given rate.
type limit struct {
	rate int64 // bytes per second; 0: none
	read atomic.Int64

	mu   sync.Mutex
	next time.Time
}

func newLimit(rate int64) *limit { return &limit{rate: rate} }

func (l *limit) wait(ctx context.Context, bytes int) error {
	l.read.Add(int64(bytes))
	if l.rate <= 0 {
		return ctx.Err()
	}
	l.mu.Lock()
	now := time.Now()
	at := l.next
	if at.Before(now) {
		at = now // what was not used is not saved up
	}
	l.next = at.Add(time.Duration(float64(bytes) / float64(l.rate) * float64(time.Second)))
	l.mu.Unlock()
	t := time.NewTimer(at.Sub(now))
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
