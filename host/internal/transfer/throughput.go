package transfer

import (
	"errors"
	"time"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/staging"
)

// LoadTime estimates how long a load of what was found in some places would take if it were queued now, at the throughput measured
// from each root to the queue's device and behind the loads that are queued already. piece is the size of one piece. 0 means that
// nothing has been loaded that way yet.
func (q *Queue) LoadTime(places []store.Place, piece int64) (longest time.Duration) {
	waiting := q.workers.Stats().Lanes
	for _, at := range places {
		pieces := float64(at.Hits)
		for _, lane := range waiting {
			if lane.Name == at.Root {
				pieces += float64(lane.QueuedRead)
			}
		}
		pieces, perSecond := q.throughputOf(at.Root, pieces)
		if perSecond == 0 {
			return 0
		}
		longest = max(longest, time.Duration(pieces*float64(piece)/perSecond*float64(time.Second)))
	}
	return longest
}

// throughputOf returns the pieces that a load waits for, those in flight too, and how fast they come from a root.
func (q *Queue) throughputOf(root string, pieces float64) (all, perSecond float64) {
	expected := q.expected(root)
	e := q.engine
	e.trafficMu.RLock()
	t := e.traffic[path{q.device, root, staging.Read}]
	e.trafficMu.RUnlock()
	if t == nil {
		return pieces, expected
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	pieces += float64(t.all.inFlight) / 2
	return pieces, t.rate.of(pieces, expected)
}

// expectation is how many bytes per second are read from a root.
type expectation struct {
	perSecond float64
	memory    bool // a GPU copies from it as fast as its bus is
}

// Expect tells how many bytes per second are read from a root, for estimates of loads before there were any, and whether it is memory.
func (e *Engine) Expect(root string, perSecond float64, memory bool) {
	e.trafficMu.Lock()
	defer e.trafficMu.Unlock()
	e.expectations[root] = expectation{perSecond, memory}
}

// expected is how many bytes per second a load gets from a root before there were any. All GPUs share the root, as the ranks of an engine
// load at the same time, but each has a bus of its own. The queue of host memory is there with GPUs, too, where an engine's scheduler is.
func (q *Queue) expected(root string) float64 {
	e := q.engine
	e.trafficMu.RLock()
	x, bus := e.expectations[root], e.buses[q.device]
	e.trafficMu.RUnlock()
	if x.memory && bus > 0 {
		return bus
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	gpus := len(e.queues)
	if _, ok := e.queues[""]; ok {
		gpus--
	}
	return x.perSecond / float64(max(1, gpus))
}

// A bus is measured by copies of so many bytes, as long as those of a load, and the fastest counts: the first one sets things up.
const (
	busBytes  = DefaultGPUCopyBytes
	busCopies = 4
)

// measureBus notes how fast a GPU's bus is. A GPU that has no room for the copies is expected to be as slow as the memory is for a processor.
func (e *Engine) measureBus(g *gds.GPU) {
	slot, ok := e.slots.TryAcquire()
	if !ok {
		return
	}
	defer slot.Release()
	from := slot.Bytes()[:min(busBytes, e.cfg.SlotBytes)]
	to, err := g.Alloc(int64(len(from)))
	if err != nil {
		e.cfg.Log.Debug("the bus is not measured", "gpu", g.UUID.String(), "error", err)
		return
	}
	best := 0.0
	err = onGPU(g, func(t *gds.Thread) error {
		for range busCopies {
			began := time.Now()
			if err := t.Write(to.Address, from); err != nil {
				return err
			}
			best = max(best, float64(len(from))/max(time.Since(began), time.Microsecond).Seconds())
		}
		return nil
	})
	if err = errors.Join(err, to.Free()); err != nil {
		e.cfg.Log.Debug("the bus is not measured", "gpu", g.UUID.String(), "error", err)
		return
	}
	e.trafficMu.Lock()
	defer e.trafficMu.Unlock()
	e.buses[g.UUID.String()] = best
}
