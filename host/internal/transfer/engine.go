package transfer

import (
	"context"
	"fmt"
	"log/slog"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
)

// Config sizes an engine.
type Config struct {
	Threads int // workers per device
	// roots that hold pieces: with several, a root that hangs can take at most three quarters of the workers
	Roots      int
	SlotBytes  int   // of one staging slot: the largest single I/O; a multiple of 4096, at least MinSlotBytes
	MaxStaging int64 // bytes of all slots together
	// bytes of a page-cached file that are copied at a time to or from a GPU; 0: DefaultGPUCopyBytes
	GPUCopyBytes int
	ReadRatio    float64       // share of loads among the tasks started while both kinds wait
	WriteQueue   time.Duration // a store that no worker has started after this is shed; 0: never
	Log          *slog.Logger
}

// MinSlotBytes is large enough for the header page and the checksum table of any piece.
const MinSlotBytes = 1 << 20

// Engine owns the staging slots and one queue per device. Close ends all its goroutines.
type Engine struct {
	cfg       Config
	slots     *staging.Slots
	hungSlots atomic.Int64     // in use by abandoned system calls
	copiers   *staging.Workers // one per CPU: more would only compete for its cache
	ctx       context.Context
	stop      context.CancelFunc
	stats     counters

	gathers, scatters staging.Bandwidth // of plain pages of GPUs to and from slots

	routes []route // in the order in which they are asked
	direct directRoute

	mu     sync.Mutex
	closed bool
	queues map[string]*Queue

	trafficMu sync.RWMutex
	traffic   map[path]*traffic
	expected  map[string]float64 // bytes per second by root: see Expect
}

// New makes an engine. Its memory is mapped at once; the workers of a device start with its first job.
func New(cfg Config) (*Engine, error) {
	switch {
	case cfg.Threads < 1:
		return nil, fmt.Errorf("%w: %d threads per device, want at least 1", ErrConfig, cfg.Threads)
	case cfg.SlotBytes < MinSlotBytes || cfg.SlotBytes%4096 != 0:
		return nil, fmt.Errorf("%w: slots of %d bytes, want a multiple of 4096 from %d on", ErrConfig, cfg.SlotBytes,
			MinSlotBytes)
	case cfg.MaxStaging < int64(cfg.SlotBytes):
		return nil, fmt.Errorf("%w: %d bytes of staging memory do not hold one slot of %d", ErrConfig, cfg.MaxStaging,
			cfg.SlotBytes)
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	slots, err := staging.NewSlots(int(cfg.MaxStaging/int64(cfg.SlotBytes)), cfg.SlotBytes)
	if err != nil {
		return nil, fmt.Errorf("transfer: staging slots: %w", err)
	}
	e := &Engine{cfg: cfg, slots: slots, queues: map[string]*Queue{}, traffic: map[path]*traffic{}, expected: map[string]float64{},
		direct: directRoute{choices: map[routeKey]*gpuRoute{}}}
	e.routes = []route{memoryRoute{}, &e.direct, stagedRoute{}}
	e.copiers = e.newWorkers(runtime.GOMAXPROCS(0), "copies")
	e.ctx, e.stop = context.WithCancel(context.Background())
	return e, nil
}

// Queue returns the named device's queue, and makes it on first use. Host memory is a device too.
func (e *Engine) Queue(device string) (*Queue, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return nil, ErrClosed
	}
	q, ok := e.queues[device]
	if !ok {
		q = &Queue{engine: e, device: device, workers: e.newWorkers(e.cfg.Threads, device)}
		q.workers.Lanes(e.cfg.Roots)
		e.queues[device] = q
	}
	return q, nil
}

// Near places the staging slots' memory on NUMA nodes. Call it before any other use of the engine, [Engine.AddGPU]
// included.
func (e *Engine) Near(nodes ...int) error { return e.slots.Near(nodes...) }

// Pages returns the kind of pages that hold the staging slots.
func (e *Engine) Pages() staging.Pages { return e.slots.Pages() }

func (e *Engine) newWorkers(n int, name string) *staging.Workers {
	w := staging.NewWorkers(n, e.cfg.ReadRatio)
	w.OnPanic(func(v any, stack []byte) {
		e.cfg.Log.Error("a transfer task panicked; its chunk has failed", "workers", name, "panic", v, "stack",
			string(stack))
	})
	return w
}

// Close fails what is queued with ErrClosed, waits for running tasks, and frees the slots.
func (e *Engine) Close() error {
	e.mu.Lock()
	if e.closed {
		e.mu.Unlock()
		return nil
	}
	e.closed = true
	queues := e.queues
	e.mu.Unlock()
	e.stop()
	for _, q := range queues {
		q.workers.Close()
	}
	e.copiers.Close()
	return e.closeSlots()
}

// Queue is one device's part of the engine: its workers alternate between loads and stores.
type Queue struct {
	engine  *Engine
	device  string
	workers *staging.Workers
	scratch sync.Pool // of *scratch
}

// scratch is the memory that a task needs besides its slot.
type scratch struct {
	table  []uint64
	stored []pieceformat.Stored
}

// forStored is room for as many stored extents as the table has.
func (s *scratch) forStored() []pieceformat.Stored {
	if cap(s.stored) < len(s.table) {
		s.stored = make([]pieceformat.Stored, len(s.table))
	}
	return s.stored[:len(s.table)]
}

func (q *Queue) takeScratch(extents int) *scratch {
	s, _ := q.scratch.Get().(*scratch)
	if s == nil {
		s = &scratch{}
	}
	if cap(s.table) < extents {
		s.table = make([]uint64, extents)
	}
	s.table = s.table[:extents]
	return s
}
