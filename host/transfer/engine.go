package transfer

import (
	"context"
	"fmt"
	"log/slog"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvhost/kvhost/staging"
)

// Config sizes an engine.
type Config struct {
	Threads      int           // workers per device
	Roots        int           // that pieces are in: where there are several, one that hangs leaves a quarter of the workers to the others
	SlotBytes    int           // of one staging slot: the largest single I/O; a multiple of 4096, at least MinSlotBytes
	MaxStaging   int64         // bytes of all slots together
	GPUCopyBytes int           // bytes of a file in the page cache moved at a time to or from a GPU; 0: DefaultGPUCopyBytes
	ReadRatio    float64       // share of loads among tasks started while both kinds wait
	WriteQueue   time.Duration // a store that no worker has begun after this is given up; 0: none is
	Log          *slog.Logger
}

// MinSlotBytes lets the header page and the checksum table of any piece fit one slot.
const MinSlotBytes = 1 << 20

// Engine owns the staging slots and one queue per device. All its goroutines end in Close.
type Engine struct {
	cfg       Config
	slots     *staging.Slots
	hungSlots atomic.Int64     // kept by system calls that were abandoned
	copiers   *staging.Workers // one per processor: more would only share its cache
	ctx       context.Context
	stop      context.CancelFunc
	stats     counters

	routesMu sync.RWMutex
	routes   map[routeKey]*route

	mu     sync.Mutex
	closed bool
	queues map[string]*Queue
	paced  map[*layered]struct{} // layer-wise loads that wait for their consumers

	trafficMu sync.RWMutex
	traffic   map[path]*traffic
}

// New makes an engine; its memory is mapped at once, its workers start with the first job of each device.
func New(cfg Config) (*Engine, error) {
	switch {
	case cfg.Threads < 1:
		return nil, fmt.Errorf("%w: %d threads per device, want at least 1", ErrConfig, cfg.Threads)
	case cfg.SlotBytes < MinSlotBytes || cfg.SlotBytes%4096 != 0:
		return nil, fmt.Errorf("%w: slots of %d bytes, want a multiple of 4096 from %d on", ErrConfig, cfg.SlotBytes, MinSlotBytes)
	case cfg.MaxStaging < int64(cfg.SlotBytes):
		return nil, fmt.Errorf("%w: %d bytes of staging memory do not hold one slot of %d", ErrConfig, cfg.MaxStaging, cfg.SlotBytes)
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	slots, err := staging.NewSlots(int(cfg.MaxStaging/int64(cfg.SlotBytes)), cfg.SlotBytes)
	if err != nil {
		return nil, fmt.Errorf("transfer: staging slots: %w", err)
	}
	e := &Engine{cfg: cfg, slots: slots, queues: map[string]*Queue{}, routes: map[routeKey]*route{}, paced: map[*layered]struct{}{}, traffic: map[path]*traffic{}}
	e.copiers = e.newWorkers(runtime.GOMAXPROCS(0), "copies")
	e.ctx, e.stop = context.WithCancel(context.Background())
	return e, nil
}

// Queue is the named device's queue, made when first asked for. Host memory is a device too.
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

// Near has the staging slots' memory taken from NUMA nodes. It comes before any use of the engine, [Engine.AddGPU] included.
func (e *Engine) Near(nodes ...int) error { return e.slots.Near(nodes...) }

// Pages says what the staging slots' memory is made of.
func (e *Engine) Pages() staging.Pages { return e.slots.Pages() }

func (e *Engine) newWorkers(n int, name string) *staging.Workers {
	w := staging.NewWorkers(n, e.cfg.ReadRatio)
	w.OnPanic(func(v any, stack []byte) {
		e.cfg.Log.Error("a transfer task panicked; its chunk has failed", "workers", name, "panic", v, "stack", string(stack))
	})
	return w
}

// Close fails what is queued with ErrClosed, waits for what runs, and frees the slots.
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
	e.releasePaced()
	e.copiers.Close()
	return e.closeSlots()
}

// Queue is one device's share of the engine: its workers take loads and stores in turn.
type Queue struct {
	engine  *Engine
	device  string
	workers *staging.Workers
	scratch sync.Pool // of *scratch
}

// scratch is what a task needs besides its slot.
type scratch struct{ table []uint64 }

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
