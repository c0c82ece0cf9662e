package store

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/kv"
)

// load is sessions that look up chains, lease them, and offer new chunks to a full root. It keeps what each call took.
type load struct {
	f      *fixture
	stop   context.CancelFunc
	work   sync.WaitGroup
	mu     sync.Mutex
	took   []time.Duration
	failed atomic.Int64
}

func (f *fixture) load(sessions, entries int) *load {
	ctx, stop := context.WithCancel(context.Background())
	l := &load{f: f, stop: stop}
	for s := range uint64(sessions) {
		l.work.Go(func() {
			for n := s; ctx.Err() == nil; n++ {
				at := n * 7919 * 1000 % uint64(entries)
				list := make([]kv.Key, 100)
				for i := range list {
					list[i] = hashKey(at+uint64(i), 32)
				}
				l.timed(func() error {
					lease, err := f.store.Lookup(LookupRequest{Namespace: f.space, Keys: list, Request: uint32(n)})
					if err == nil {
						lease.Release()
					}
					return err
				})
				l.timed(func() error {
					q := PutRequest{Namespace: f.space, Key: hashKey(1<<40|s<<32|n, 32)}
					p, err := f.store.Put(ctx, q)
					if err == nil {
						p.Abort(errors.New("only reserved"))
					} else if errors.Is(err, context.Canceled) {
						err = nil
					}
					return err
				})
				f.store.EndRequest(uint32(n), abi.Hints{})
				time.Sleep(200 * time.Microsecond) // a session does other things, too
			}
		})
	}
	return l
}

func (l *load) timed(call func() error) {
	start := time.Now()
	if err := call(); err != nil {
		l.failed.Add(1)
		l.f.Error(err)
	}
	d := time.Since(start)
	l.mu.Lock()
	l.took = append(l.took, d)
	l.mu.Unlock()
}

// while gives the longest and the 99.9th percentile of what calls took while something was done, and their number.
func (l *load) while(do func()) (longest, most time.Duration, calls int) {
	l.mu.Lock()
	l.took = l.took[:0]
	l.mu.Unlock()
	do()
	l.mu.Lock()
	defer l.mu.Unlock()
	took := slices.Clone(l.took)
	if len(took) == 0 {
		l.f.Fatal("nobody called")
	}
	slices.Sort(took)
	return took[len(took)-1], took[len(took)*999/1000], len(took)
}

// BenchmarkTakeOver changes the evict policy of a root with a million residents under load: by a swap, and by a fault,
// after which recency answers. What it reports is what a session waits for one call meanwhile, beside the same without
// a change.
func BenchmarkTakeOver(b *testing.B) {
	const entries, sessions = 1_000_000, 4
	f := indexOnly(b, entries, 32)
	for _, r := range f.store.roots {
		r.FS = fileless{r.FS}
	}
	f.fill(entries, 32)
	swap := func(u *policy.Handle) {
		if _, err := f.store.Swap(b.Context(), Swap{Policies: [abi.Roles]*policy.Handle{abi.RoleEvict: u}}); err != nil {
			b.Fatal(err)
		}
	}
	swap(use(b, "lru", nil, nil))
	report := func(b *testing.B, prepare, change func()) {
		l := f.load(sessions, entries)
		defer func() { l.stop(); l.work.Wait() }()
		var opened, quiet, longest, most, took time.Duration
		for b.Loop() {
			d, _, _ := l.while(prepare)
			opened = max(opened, d)
			start := time.Now()
			d, m, _ := l.while(change)
			once := time.Since(start)
			longest, most, took = max(longest, d), max(most, m), took+once
			d, _, _ = l.while(func() { time.Sleep(once) })
			quiet = max(quiet, d)
		}
		b.ReportMetric(float64(opened.Microseconds())/1e3, "open-longest-ms")
		b.ReportMetric(float64(longest.Microseconds())/1e3, "longest-ms")
		b.ReportMetric(float64(most.Microseconds())/1e3, "p99.9-ms")
		b.ReportMetric(float64(quiet.Microseconds())/1e3, "quiet-longest-ms")
		b.ReportMetric(took.Seconds()/float64(b.N), "s/change")
		b.ReportMetric(float64(l.failed.Load()), "failed")
	}
	b.Run("swap", func(b *testing.B) {
		var u *policy.Handle
		report(b, func() { u = use(b, "lru", nil, nil) }, func() { swap(u) })
	})
	b.Run("fault", func(b *testing.B) {
		report(b, func() { time.Sleep(100 * time.Millisecond) }, func() {
			r := f.root()
			r.Lock()
			r.Evictor.Fail(errors.New("a fault, for the figure"))
			r.Unlock()
			for {
				r.Lock()
				down := r.Evictor.Down()
				r.Unlock()
				if !down {
					return
				}
				time.Sleep(10 * time.Millisecond)
			}
		})
	})
}
