package store

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"testing"
)

// roomyDirs are where the concurrency tests run: on disk, and on tmpfs where there is one.
func roomyDirs(t *testing.T) map[string]string {
	dirs := map[string]string{"disk": t.TempDir()}
	if dir, err := os.MkdirTemp("/dev/shm", "kvhost-store-"); err == nil {
		t.Cleanup(func() { os.RemoveAll(dir) })
		dirs["shm"] = dir
	}
	return dirs
}

// TestManyClients has clients store, load, damage, abort and look up the same keys at once, over two roots, with room
// for half of them. Loads give what was stored or fail; the account is exact at the end.
func TestManyClients(t *testing.T) {
	for where, dir := range roomyDirs(t) {
		t.Run(where, func(t *testing.T) {
			f := newFixture(t, dir+"/a", 10, 2, func(c *Config) {
				c.Roots = append(c.Roots, c.Roots[0])
				c.Roots[1].Path = dir + "/b"
			})
			var clients sync.WaitGroup
			var hits, stores atomic.Int64
			for id := range 8 {
				clients.Go(func() {
					rng := rand.New(rand.NewPCG(uint64(id), 5))
					for range 150 {
						if rng.IntN(2) == 0 {
							f.storeSome(rng, &stores)
						} else {
							f.loadSome(rng, &hits)
						}
						f.overCapacity()
					}
				})
			}
			clients.Wait()
			resume := f.rested()
			for _, r := range f.store.roots {
				noError(t, r.idle())
			}
			f.checkUsed()
			resume()
			if hits.Load() == 0 || stores.Load() == 0 {
				t.Errorf("%d hits and %d stores, want some of each", hits.Load(), stores.Load())
			}
			f.restart()
			f.checkUsed()
		})
	}
}

func (f *fixture) overCapacity() {
	for _, r := range f.store.Stats().Roots {
		if r.Used > r.Capacity {
			f.Errorf("%d bytes used of %d", r.Used, r.Capacity)
		}
	}
}

func (f *fixture) storeSome(rng *rand.Rand, stores *atomic.Int64) {
	n, rank := rng.Uint64N(40), uint32(rng.IntN(2))
	p, err := f.store.Put(context.Background(), f.request(n, n-1, rank))
	if err != nil {
		if !errors.Is(err, ErrResident) && !errors.Is(err, ErrNoSpace) {
			f.Errorf("put: %v", err)
		}
		return
	}
	if rng.IntN(8) == 0 {
		p.Abort(errors.New("on purpose"))
		return
	}
	if err = write(p); err == nil {
		err = p.Publish(context.Background())
	}
	if err != nil && !errors.Is(err, ErrGone) {
		f.Errorf("store: %v", err)
	}
	p.Abort(err)
	stores.Add(1)
}

func (f *fixture) loadSome(rng *rand.Rand, hits *atomic.Int64) {
	from := rng.Uint64N(40)
	l := f.lookup(from, from+1, from+2)
	for i := range l.Hits() {
		rank := uint32(rng.IntN(2))
		if rng.IntN(50) == 0 {
			if p, err := l.Open(i, rank); err == nil {
				p.Bad(errors.New("on purpose"))
				p.Close()
			}
			continue
		}
		data, err := read(l, i, rank)
		switch {
		case err == nil && !bytes.Equal(data, payload(f.space.Plan(0), testKey(from+uint64(i)), rank)):
			f.Errorf("key %d: other bytes than were stored", from+uint64(i))
		case err == nil:
			hits.Add(1)
		case !errors.Is(err, ErrGone) && !errors.Is(err, os.ErrNotExist):
			f.Errorf("load: %v", err)
		}
	}
	go l.Release()
	l.Release()
}

// TestOnePutPerPiece has clients race for the same pieces: each is granted once.
func TestOnePutPerPiece(t *testing.T) {
	f := newFixture(t, t.TempDir(), 40, 2)
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
	f := newFixture(t, t.TempDir(), 4, 1)
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
	f := newFixture(t, t.TempDir(), 4, 1)
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
