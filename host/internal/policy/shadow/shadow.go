package shadow

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvhost/kvhost/host/internal/policy"
)

// queueLength is the most batches that wait for a shadow.
const queueLength = 256

// Stats count the steps of a shadow and the hits of its cache.
type Stats struct {
	policy.Stats
	Keys     uint64 // keys that were looked up and received
	Hits     uint64 // keys that the shadow would have granted
	LiveHits uint64 // keys that the live cache granted
	Dropped  uint64 // steps lost because the shadow was too slow
	Entries  int
	Used     int64
	Capacity int64
	Err      error // the reason for which it receives nothing now; nil while it works
}

// Shadow is an evict policy that is judged on live requests.
type Shadow struct {
	queue     chan *Batch
	restarted chan *policy.Evict // receives the new instance after a fault
	cancel    context.CancelFunc
	wg        sync.WaitGroup
	dropped   atomic.Uint64
	module    *policy.Module
	options   policy.EvictOptions
	cache     *cache         // used by the run goroutine
	backoff   policy.Backoff // used by the run goroutine, or by the restart in progress

	mu    sync.Mutex // locked after each batch, for Stats
	evict *policy.Evict
	past  policy.Stats // counts of earlier instances
	seen  Stats
}

// Start starts a shadow. Options.Capacity is the capacity of its imaginary cache.
func Start(ctx context.Context, m *policy.Module, o policy.EvictOptions) (*Shadow, error) {
	evict, err := m.NewEvict(ctx, o)
	if err != nil {
		return nil, err
	}
	run, cancel := context.WithCancel(context.Background())
	s := &Shadow{
		queue: make(chan *Batch, queueLength), restarted: make(chan *policy.Evict), cancel: cancel, module: m, options: o,
		evict: evict, cache: newCache(evict, int64(o.Capacity), o.MaxSlots), seen: Stats{Capacity: int64(o.Capacity)},
	}
	s.wg.Go(func() { s.run(run) })
	return s, nil
}

// Close ends the shadow. It must have been removed from its set.
func (s *Shadow) Close() {
	s.cancel()
	s.wg.Wait()
	_ = s.evict.Close() // it never fails
}

// Stats may be called at any time.
func (s *Shadow) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := s.seen
	st.Stats, st.Dropped = s.evict.Stats(), s.dropped.Load()
	st.Stats.Add(s.past)
	return st
}

func (s *Shadow) run(ctx context.Context) {
	var failed error
	for {
		select {
		case <-ctx.Done():
			return
		case evict := <-s.restarted:
			s.install(evict)
			failed = nil
		case b := <-s.queue:
			for i := range b.steps {
				if failed != nil {
					break
				}
				if failed = s.cache.step(&b.steps[i]); failed != nil {
					s.restart(ctx)
				}
			}
			b.release()
		}
		c := s.cache
		s.mu.Lock()
		s.seen.Keys, s.seen.Hits, s.seen.LiveHits = c.keys, c.hits, c.live
		s.seen.Entries, s.seen.Used, s.seen.Err = c.set.Len(), c.set.Used(), failed
		s.mu.Unlock()
	}
}

// restart starts a new instance after a pause, unless there were too many faults.
func (s *Shadow) restart(ctx context.Context) {
	pause, ok := s.backoff.Failed(time.Now())
	if !ok {
		return
	}
	start := func(ctx context.Context) error {
		evict, err := s.module.NewEvict(ctx, s.options)
		if err != nil {
			return err
		}
		select {
		case s.restarted <- evict:
		case <-ctx.Done():
			_ = evict.Close() // it never fails
		}
		return nil
	}
	s.wg.Go(func() {
		policy.Supervise(ctx, pause, start, func(error) (policy.Verdict, time.Duration) {
			pause, ok := s.backoff.Failed(time.Now())
			if !ok {
				return policy.Quarantine, 0
			}
			return policy.Restart, pause
		})
	})
}

// install replaces a failed instance by a new one with an empty cache. The counts remain.
func (s *Shadow) install(evict *policy.Evict) {
	c := newCache(evict, int64(s.options.Capacity), s.options.MaxSlots)
	c.keys, c.hits, c.live = s.cache.keys, s.cache.hits, s.cache.live
	s.cache = c
	s.mu.Lock()
	old := s.evict
	s.past.Add(old.Stats())
	s.evict = evict
	s.mu.Unlock()
	_ = old.Close() // it never fails
}
