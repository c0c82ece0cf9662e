package transfer

import (
	"time"

	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/staging"
)

// LoadTime estimates the duration of a load from some places, queued now behind the queued loads, by the measured
// throughput from each root to the queue's device. piece is the size of one piece in bytes. The result is 0 if no
// throughput was measured yet.
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

// throughputOf returns the number of pieces that a load waits for, those in flight included, and a root's bytes per
// second.
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

// Expect sets the read speed of a root in bytes per second, for estimates before the first load, and whether the root
// is memory.
func (e *Engine) Expect(root string, perSecond float64, memory bool) {
	e.trafficMu.Lock()
	defer e.trafficMu.Unlock()
	e.expectations[root] = expectation{perSecond, memory}
}

// expected returns the bytes per second of a load from a root before its first load. All GPUs share the root's speed,
// since the ranks of an engine load at the same time, but each GPU has its own bus. The queue of host memory does not
// count: an engine with GPUs has one for its scheduler.
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
