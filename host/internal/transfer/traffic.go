package transfer

import (
	"cmp"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/kvhost/kvhost/staging"
)

// Routes, as indices of counters.
const (
	byStaging = iota
	byCuFile
	byMemory
)

var routeNames = [...]string{byStaging: "staged", byCuFile: "direct", byMemory: "memory"}

// TrafficBounds are the upper bounds of the latency buckets, in seconds. One more bucket is above the last.
var TrafficBounds = [...]float64{0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 30}

// path names the two ends of bytes: a device's memory and a root, in one direction.
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

// clock counts pieces in flight, and the time with at least one in flight.
type clock struct {
	inFlight int
	since    time.Time // start of the present busy time
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
	p.paths.add(t.root, routeNames[p.route], p.began, now, bytes, err)
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

// Traffic counts the pieces that moved between one device's memory and one root, in one direction.
type Traffic struct {
	Device   string // the device's name in HELLO; empty: host memory
	Root     string
	Kind     staging.Kind  // Read is a load
	InFlight int           // number of pieces
	Busy     time.Duration // time with at least one piece in flight
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
	Buckets              [len(TrafficBounds) + 1]int64 // pieces by time, not cumulative
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

// throughput estimates the bytes per second of a path from finished pieces. It rises at once and falls slowly, since
// not every load uses the whole path.
type throughput struct {
	few, many float64 // bytes per second of loads below manyPieces, which mostly wait for the first byte, and of others; 0: unknown
	bytes     int64   // bytes of the sample being taken
	finished  int     // pieces of that sample
	before    int     // pieces in flight when that sample began
	from      time.Duration
}

// A sample ends when the path falls idle, or after this much busy time.
const sampleTime = 50 * time.Millisecond

// A sample counts if sureTimes times as many pieces finish in it as are in flight at its ends. The progress of those in
// flight is not known: all pieces of a layer-wise load finish at its end, and would seem to take no time.
const sureTimes = 4

// manyPieces is the number of pieces that show the full speed of a path.
const manyPieces = 16

// of returns the estimate for a load of pieces, in bytes per second. expected is a speed that was measured otherwise;
// 0: none.
func (r *throughput) of(pieces, expected float64) float64 {
	if pieces < manyPieces {
		return cmp.Or(r.few, r.many, expected)
	}
	return cmp.Or(r.many, max(r.few, expected))
}

// add counts a finished piece. busy is the path's busy time then, and inFlight the number of other pieces.
func (r *throughput) add(bytes int64, busy time.Duration, inFlight int) {
	r.bytes += bytes
	r.finished++
	took := busy - r.from
	sure := r.finished >= sureTimes*(r.before+inFlight)
	if took <= 0 || inFlight > 0 && (took < sampleTime || !sure) {
		return
	}
	if sure {
		perSecond := &r.few
		if r.finished+inFlight >= manyPieces {
			perSecond = &r.many
		}
		if v := float64(r.bytes) / took.Seconds(); v > *perSecond {
			*perSecond = v
		} else {
			*perSecond += (v - *perSecond) / 8
		}
	}
	r.bytes, r.finished, r.before, r.from = 0, 0, inFlight, busy
}
