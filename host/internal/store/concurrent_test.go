package store

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
)

// TestOnePutPerPiece has clients race for the same pieces: each is granted once.
func TestOnePutPerPiece(t *testing.T) {
	f := newFixture(t, 40, 2)
	var granted [20][2]atomic.Int64
	var clients sync.WaitGroup
	for range 6 {
		clients.Go(func() {
			for n := range uint64(20) {
				for rank := range uint32(2) {
					switch err := f.put(n, rank); {
					case err == nil:
						granted[n][rank].Add(1)
					case !errors.Is(err, ErrResident):
						t.Errorf("put: %v", err)
					}
				}
			}
		})
	}
	clients.Wait()
	for n := range granted {
		for rank := range granted[n] {
			if got := granted[n][rank].Load(); got != 1 {
				t.Errorf("key %d rank %d was stored %d times", n, rank, got)
			}
		}
	}
	f.checkUsed()
}

// TestReleaseBesideOpen releases a lease while others open pieces under it.
func TestReleaseBesideOpen(t *testing.T) {
	f := newFixture(t, 4, 1)
	f.mustPut(0, 1)
	for range 100 {
		l := f.lookup(0, 1)
		var both sync.WaitGroup
		for i := range 2 {
			both.Go(func() {
				p, err := l.Open(i, 0)
				if err == nil {
					p.Close()
				} else if !errors.Is(err, ErrLeaseOver) {
					t.Error(err)
				}
			})
			both.Go(l.Release)
		}
		both.Wait()
	}
	noError(t, f.idle())
}

// TestWaitingEndsWithTheContext lets puts wait for the turn and for a key's stripe.
func TestWaitingEndsWithTheContext(t *testing.T) {
	f := newFixture(t, 4, 1)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	resume := f.rested()
	if _, err := f.store.Put(ctx, f.request(1, 0, 0)); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	resume()
	for _, stripe := range f.store.stripes {
		_ = stripe.Acquire(context.Background(), 1)
	}
	if _, err := f.store.Put(ctx, f.request(1, 0, 0)); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	for _, stripe := range f.store.stripes {
		stripe.Release(1)
	}
	f.mustPut(1)
}
