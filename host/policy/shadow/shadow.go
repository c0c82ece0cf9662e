package shadow

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

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
	Err       error // why it hears nothing at present, or any more
}

// A shadow whose policy fails begins anew, with an empty cache, after a pause that each fault doubles; after so many it is over.
const (
	firstPause = 100 * time.Millisecond
	mostFaults = 6
)

// Shadow is an evict policy on trial.
type Shadow struct {
	queue   chan *Batch
	stop    context.CancelFunc
	over    sync.WaitGroup
	dropped atomic.Uint64
	module  *policy.Module
	options policy.EvictOptions
	cache   *cache    // the goroutine's
	faults  int       // likewise
	again   time.Time // likewise: when it begins anew

	mu    sync.Mutex // after each batch, for Stats
	evict *policy.Evict
	past  policy.Stats // of the instances before
	seen  Stats
}

// Start begins a trial. Options.Capacity is the imaginary cache's.
func Start(ctx context.Context, m *policy.Module, o policy.EvictOptions) (*Shadow, error) {
	evict, err := m.NewEvict(ctx, o)
	if err != nil {
		return nil, err
	}
	run, stop := context.WithCancel(context.Background())
	s := &Shadow{
		queue: make(chan *Batch, queued), stop: stop, module: m, options: o, evict: evict, cache: newCache(evict, int64(o.Capacity), o.MaxSlots),
		seen: Stats{Capacity: int64(o.Capacity)},
	}
	s.over.Go(func() { s.listen(run) })
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
	st.Calls, st.Records, st.Time = st.Calls+s.past.Calls, st.Records+s.past.Records, st.Time+s.past.Time
	st.Fuel, st.Faults = st.Fuel+s.past.Fuel, st.Faults+s.past.Faults
	return st
}

func (s *Shadow) listen(ctx context.Context) {
	var failed error
	for {
		select {
		case <-ctx.Done():
			return
		case b := <-s.queue:
			if failed != nil && s.faults < mostFaults && !time.Now().Before(s.again) {
				failed = s.anew(ctx)
			}
			for i := range b.steps {
				if failed == nil {
					failed = s.heed(&b.steps[i])
				}
			}
			b.done()
		}
		c := s.cache
		s.mu.Lock()
		s.seen.Keys, s.seen.Hits, s.seen.LiveHits, s.seen.Evictions, s.seen.Sheds = c.keys, c.hits, c.live, c.evictions, c.sheds
		s.seen.Entries, s.seen.Used, s.seen.Err = len(c.slotOf), c.used, failed
		s.mu.Unlock()
	}
}

// heed makes one step, and notes when the policy fails at it.
func (s *Shadow) heed(step *Step) error {
	err := s.cache.step(step)
	if err != nil {
		s.again = time.Now().Add(firstPause << s.faults)
		s.faults++
	}
	return err
}

// anew puts a fresh instance, for which nothing is resident, in the place of one that failed. What was counted stays.
func (s *Shadow) anew(ctx context.Context) error {
	evict, err := s.module.NewEvict(ctx, s.options)
	if err != nil {
		s.again = time.Now().Add(firstPause << s.faults)
		s.faults++
		return err
	}
	c := newCache(evict, int64(s.options.Capacity), s.options.MaxSlots)
	c.keys, c.hits, c.live, c.evictions, c.sheds = s.cache.keys, s.cache.hits, s.cache.live, s.cache.evictions, s.cache.sheds
	s.cache = c
	s.mu.Lock()
	old := s.evict
	was := old.Stats()
	s.past.Calls, s.past.Records, s.past.Time = s.past.Calls+was.Calls, s.past.Records+was.Records, s.past.Time+was.Time
	s.past.Fuel, s.past.Faults = s.past.Fuel+was.Fuel, s.past.Faults+was.Faults
	s.evict = evict
	s.mu.Unlock()
	return old.Close()
}
