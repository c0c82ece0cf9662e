package store

import "context"

// latch is a mutex whose waiting ends with a context. Who waits longest is next.
type latch chan struct{}

func newLatch() latch { return make(latch, 1) }

func (l latch) lock(ctx context.Context) error {
	select {
	case l <- struct{}{}:
		return nil
	default:
	}
	select {
	case l <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (l latch) unlock() { <-l }
