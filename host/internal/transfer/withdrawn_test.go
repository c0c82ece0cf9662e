package transfer

import (
	"errors"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
)

// A store is withdrawn at each step, before its pages are read and after each part of them, and its client uses the blocks at
// once. It is published only where all was read before, with the bytes from before; else nothing of it is found or left.
func TestWithdrawnStoresAreNotPublished(t *testing.T) {
	testenv.Slow(t)
	everyRoute(t, func(t *testing.T, r *routeRig) {
		for step, last := 0, false; !last; step++ {
			asked, back := 0, step == 0
			ids := r.shuffled(1)
			chunk := r.put(step, ids[0])
			if back {
				r.poison()
			}
			out := make(chan Outcome, 1)
			r.queue.Store(&StoreJob{Memory: r.from, Chunks: []StoreChunk{chunk}, Read: func(Outcome) {},
				Published: func(o Outcome) { out <- o }, Withdrawn: func() (bool, error) {
					if asked++; back {
						return true, nil
					}
					if asked == step {
						back = true
						r.poison()
					}
					return false, nil
				}})
			o := <-out
			if asked == 0 {
				t.Fatal("a store asks never whether it was withdrawn, want it asked after each part of the pages")
			}
			last = asked == step // it was withdrawn after the last part
			hits := r.hits(step)
			if !last {
				if len(o.Failed) != 1 || !errors.Is(o.Failed[0].Err, ErrCancelled) || hits != 0 {
					t.Fatalf("withdrawn at step %d: %+v, %d hits; want its chunk cancelled and not found", step, o.Failed, hits)
				}
				continue
			}
			if len(o.Failed) > 0 || hits != 1 {
				t.Fatalf("withdrawn after all was read: %+v failed, %d hits; want it published", o.Failed, hits)
			}
			r.poison()
			to := r.shuffled(1)
			if got := r.loadTo(r.queue, r.from, []int{step}, to, nil); len(got.Failed) > 0 {
				t.Fatalf("loaded: %+v failed, want none", got.Failed)
			}
			r.hold(map[int][]uint32{step: to[0]}, nil)
		}
		if w := r.deviceRig.store.Stats().Roots[0].Writing; w != 0 {
			t.Errorf("%d bytes are still being written, want none", w)
		}
		r.idle()
	})
}

// A word in memory that is gone fails the chunk, as pages that are gone do.
func TestWithdrawalsThatCannotBeRead(t *testing.T) {
	everyRoute(t, func(t *testing.T, r *routeRig) {
		chunk := r.put(0, r.shuffled(1)[0])
		out := make(chan Outcome, 1)
		r.queue.Store(&StoreJob{Memory: r.from, Chunks: []StoreChunk{chunk}, Read: func(Outcome) {},
			Published: func(o Outcome) { out <- o }, Withdrawn: func() (bool, error) { return false, ErrMemory }})
		if o := <-out; len(o.Failed) != 1 || !errors.Is(o.Failed[0].Err, ErrMemory) || r.hits(0) != 0 {
			t.Errorf("stored: %+v, %d hits; want the chunk failed with ErrMemory and not found", o.Failed, r.hits(0))
		}
		r.idle()
	})
}
