package shadow

import (
	"context"
	"sync"
	"sync/atomic"

	"github.com/kvhost/kvhost/host/policy"
)

// queued is how many batches wait for a shadow.
const queued = 256

// Stats are what a shadow has seen and would have had.
type Stats struct {
	policy.Stats
	Keys      uint64 // looked up, and heard of
	Hits      uint64 // of those, what it would have granted
	LiveHits  uint64 // of those, what was granted
	Dropped   uint64 // steps that it was too slow to hear of
	Evictions uint64
	Sheds     uint64 // chunks for which its policy made no room
	Entries   int
	Used      int64
	Capacity  int64
	Err       error // why it has ended before its time
}

// Shadow is an evict policy on trial.
type Shadow struct {
	queue   chan *Batch
	stop    context.CancelFunc
	over    sync.WaitGroup
	dropped atomic.Uint64
	evict   *policy.Evict

	mu   sync.Mutex // after each batch, for Stats
	seen Stats
}

// Start begins a trial. Options.Capacity is the imaginary cache's.
func Start(ctx context.Context, m *policy.Module, o policy.EvictOptions) (*Shadow, error) {
	evict, err := m.NewEvict(ctx, o)
	if err != nil {
		return nil, err
	}
	run, stop := context.WithCancel(context.Background())
	s := &Shadow{queue: make(chan *Batch, queued), stop: stop, evict: evict, seen: Stats{Capacity: int64(o.Capacity)}}
	s.over.Go(func() { s.listen(run, newCache(evict, int64(o.Capacity), o.MaxSlots)) })
	return s, nil
}

// Close ends the trial. The stream must not have it any more.
func (s *Shadow) Close() {
	s.stop()
	s.over.Wait()
	_ = s.evict.Close() // it never fails
}

// Stats may be called at any time.
func (s *Shadow) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := s.seen
	st.Stats, st.Dropped = s.evict.Stats(), s.dropped.Load()
	return st
}

func (s *Shadow) listen(ctx context.Context, c *cache) {
	var failed error
	for {
		select {
		case <-ctx.Done():
			return
		case b := <-s.queue:
			for i := range b.steps {
				if failed == nil {
					failed = c.step(&b.steps[i])
				}
			}
			b.done()
		}
		s.mu.Lock()
		if s.seen.Err == nil {
			s.seen.Keys, s.seen.Hits, s.seen.LiveHits, s.seen.Evictions, s.seen.Sheds = c.keys, c.hits, c.live, c.evictions, c.sheds
			s.seen.Entries, s.seen.Used, s.seen.Err = len(c.slotOf), c.used, failed
		}
		s.mu.Unlock()
	}
}
