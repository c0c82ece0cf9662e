package transfer

import (
	"time"

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
	e := q.engine
	e.trafficMu.RLock()
	t, expected := e.traffic[path{q.device, root, staging.Read}], e.expected[root]
	e.trafficMu.RUnlock()
	if expected > 0 {
		e.mu.Lock()
		expected /= float64(max(1, len(e.queues))) // those of one engine load at the same time
		e.mu.Unlock()
	}
	if t == nil {
		return pieces, expected
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	pieces += float64(t.all.inFlight) / 2
	return pieces, t.rate.of(pieces, expected)
}

// Expect tells how many bytes per second are read from a root, for estimates of loads before there were any.
func (e *Engine) Expect(root string, perSecond float64) {
	e.trafficMu.Lock()
	defer e.trafficMu.Unlock()
	e.expected[root] = perSecond
}
