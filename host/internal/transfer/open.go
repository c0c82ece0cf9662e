package transfer

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"runtime"
	"time"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/staging"
)

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
	cfg.Log = cmp.Or(cfg.Log, slog.New(slog.DiscardHandler))
	slots, err := staging.NewSlots(int(cfg.MaxStaging/int64(cfg.SlotBytes)), cfg.SlotBytes)
	if err != nil {
		return nil, fmt.Errorf("transfer: staging slots: %w", err)
	}
	e := &Engine{cfg: cfg, slots: slots, queues: map[string]*Queue{}, traffic: map[path]*traffic{},
		expectations: map[string]expectation{}, buses: map[string]float64{},
		direct: routeChoices{chosen: map[routeKey]*gpuRoute{}}}
	e.routes = []route{memoryRoute{}, directRoute{&e.direct}, stagedRoute{}}
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

// Close fails queued jobs with ErrClosed, waits for running tasks, and frees the slots.
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

// SetRoute sets the route between a GPU and a root, which is named by its directory. Without it pieces are staged.
func (e *Engine) SetRoute(g *gds.GPU, root string, c RouteChoice) {
	e.direct.mu.Lock()
	defer e.direct.mu.Unlock()
	e.direct.chosen[routeKey{g, root}] = &gpuRoute{
		choice: c, gpu: g.UUID.String(), root: root, log: e.cfg.Log.With("gpu", g.UUID.String(), "root", root),
		now: time.Now,
	}
}
