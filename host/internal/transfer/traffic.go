package transfer

import (
	"cmp"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/kvhost/kvhost/staging"
)

// Routes, as they are counted.
const (
	byStaging = iota
	byCuFile
	byMemory
)

var routeNames = [...]string{byStaging: "staged", byCuFile: "direct", byMemory: "memory"}

// TrafficBounds are the upper bounds of the latency buckets, in seconds. One more bucket holds what is above.
var TrafficBounds = [...]float64{0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 30}

// path is where bytes go: between a device's memory and a root, in one direction.
type path struct {
	device, root string
	kind         staging.Kind
}

// traffic counts the pieces of one path.
type traffic struct {
	root string

	mu    sync.Mutex
	all   clock
	moved [len(routeNames)]routeTraffic
	rate  throughput
}

// clock counts pieces in flight, and the time during which there was any.
type clock struct {
	inFlight int
	since    time.Time // since there is at least one
	past     time.Duration
}

func (c *clock) begin(now time.Time) {
	if c.inFlight++; c.inFlight == 1 {
		c.since = now
	}
}

func (c *clock) end(now time.Time) {
	if c.inFlight--; c.inFlight == 0 {
		c.past += now.Sub(c.since)
	}
}

func (c *clock) busy(now time.Time) time.Duration {
	if c.inFlight == 0 {
		return c.past
	}
	return c.past + now.Sub(c.since)
}

type routeTraffic struct {
	clock
	files, errors, bytes int64
	took                 time.Duration
	buckets              [len(TrafficBounds) + 1]int64
}

// span measures one piece from its opening to its end. The zero span is of a piece that was never opened.
type span struct {
	on    *traffic
	began time.Time
	route int
	paths *Paths
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

// setRoute moves a span to another route.
func (p *span) setRoute(route int) {
	t := p.on
	if t == nil || p.route == route {
		return
	}
	now := time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	t.moved[p.route].end(now)
	t.moved[route].begin(now)
	p.route = route
}

// finish ends a span. A cancelled one counts as neither moved nor failed.
func (p *span) finish(bytes int64, err error) {
	t := p.on
	if t == nil {
		return
	}
	now := time.Now()
	p.paths.add(p, now, bytes, err)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.all.end(now)
	m := &t.moved[p.route]
	m.end(now)
	if err == nil {
		t.rate.add(bytes, t.all.busy(now), t.all.inFlight)
	}
	switch {
	case err == nil:
		took := now.Sub(p.began)
		m.files++
		m.bytes += bytes
		m.took += took
		i, _ := slices.BinarySearch(TrafficBounds[:], took.Seconds())
		m.buckets[i]++
	case !errors.Is(err, ErrCancelled):
		m.errors++
	}
}

// Traffic is what moved between one device's memory and one root, in one direction.
type Traffic struct {
	Device   string // as HELLO named it; empty: host memory
	Root     string
	Kind     staging.Kind  // Read is a load
	InFlight int           // pieces
	Busy     time.Duration // time during which at least one was in flight
	Routes   []RouteTraffic
}

// RouteTraffic counts the pieces that took a route. Times are from a piece's opening to its delivery or publication.
// A piece in flight is counted on its present route: after a failed direct operation it moves to the staged route.
type RouteTraffic struct {
	Route                string
	InFlight             int
	Busy                 time.Duration
	Files, Errors, Bytes int64
	Took                 time.Duration
	Buckets              [len(TrafficBounds) + 1]int64 // by time, not cumulative
}

// Traffic lists what has moved, by device, root and direction.
func (e *Engine) Traffic() (list []Traffic) {
	e.trafficMu.RLock()
	defer e.trafficMu.RUnlock()
	for key, t := range e.traffic {
		list = append(list, t.read(key))
	}
	slices.SortFunc(list, func(a, b Traffic) int {
		return cmp.Or(cmp.Compare(a.Device, b.Device), cmp.Compare(a.Root, b.Root), cmp.Compare(a.Kind, b.Kind))
	})
	return list
}

func (t *traffic) read(key path) Traffic {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Now()
	out := Traffic{Device: key.device, Root: key.root, Kind: key.kind, InFlight: t.all.inFlight, Busy: t.all.busy(now)}
	for i := range t.moved {
		if m := &t.moved[i]; m.files+m.errors > 0 || m.inFlight > 0 {
			out.Routes = append(out.Routes, RouteTraffic{routeNames[i], m.inFlight, m.busy(now), m.files, m.errors,
				m.bytes, m.took, m.buckets})
		}
	}
	return out
}

// QueueStats counts what is queued and running on a device's queue.
type QueueStats struct {
	Device string
	staging.WorkersStats
}

func (e *Engine) Queues() (list []QueueStats) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, q := range e.queues {
		list = append(list, QueueStats{q.device, q.workers.Stats()})
	}
	slices.SortFunc(list, func(a, b QueueStats) int { return cmp.Compare(a.Device, b.Device) })
	return list
}
