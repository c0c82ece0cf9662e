package transfer

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
)

// Config sizes an engine.
type Config struct {
	Threads int // workers per device
	// number of roots. With several, a root that hangs can take at most three quarters of the workers
	Roots      int
	SlotBytes  int           // bytes of one staging slot, which is the largest single I/O; a multiple of 4096, at least MinSlotBytes
	MaxStaging int64         // bytes of all slots together
	ReadRatio  float64       // share of loads among the tasks started while both kinds wait
	WriteQueue time.Duration // longest wait of a store for a worker; then it is shed. 0: no limit
	Log        *slog.Logger
}

// MinSlotBytes is large enough for the header page and the checksum table of any piece.
const MinSlotBytes = 1 << 20

// Engine owns the staging slots and one queue per device. Close ends all its goroutines.
type Engine struct {
	cfg       Config
	slots     *staging.Slots
	hungSlots atomic.Int64     // slots in use by abandoned system calls
	copiers   *staging.Workers // one per CPU: more would only compete for its cache
	ctx       context.Context
	stop      context.CancelFunc
	stats     counters

	gathers, scatters staging.Bandwidth // speed of copies between a GPU's plain pages and slots

	routes []route // in the order of their turns
	direct routeChoices

	mu     sync.Mutex
	closed bool
	queues map[string]*Queue

	trafficMu    sync.RWMutex
	traffic      map[path]*traffic
	expectations map[string]expectation // read speeds by root
	buses        map[string]float64     // bytes per second by GPU
}

// expectation is the measured read speed of a root.
type expectation struct {
	perSecond float64
	memory    bool // the root is memory: a GPU copies from it at the speed of its bus
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

// Queue is one device's part of the engine: its workers alternate between loads and stores.
type Queue struct {
	engine  *Engine
	device  string
	workers *staging.Workers
	scratch sync.Pool // holds *scratch
}

// scratch is the memory that a task needs besides its slot.
type scratch struct {
	table  []uint64
	stored []pieceformat.Stored
}

// forStored returns room for as many stored extents as the table has.
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

// startSpan starts a span on the staged route. paths, if any, records its end.
func (q *Queue) startSpan(root string, kind staging.Kind, paths *Paths) span {
	e, key := q.engine, path{q.device, root, kind}
	e.trafficMu.RLock()
	t := e.traffic[key]
	e.trafficMu.RUnlock()
	if t == nil {
		e.trafficMu.Lock()
		if t = e.traffic[key]; t == nil {
			t = &traffic{root: root}
			e.traffic[key] = t
		}
		e.trafficMu.Unlock()
	}
	now := time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	t.all.begin(now)
	t.moved[byStaging].begin(now)
	return span{on: t, began: now, route: byStaging, paths: paths}
}

type counters struct {
	storedFiles, storedBytes, storeErrors, storesShed atomic.Int64
	loadedFiles, loadedBytes, loadErrors              atomic.Int64
}

func (c *counters) stored(bytes int64) {
	c.storedFiles.Add(1)
	c.storedBytes.Add(bytes)
}

func (c *counters) loaded(bytes int64) {
	c.loadedFiles.Add(1)
	c.loadedBytes.Add(bytes)
}
