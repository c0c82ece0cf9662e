package policy

import (
	"sync/atomic"
	"time"

	"github.com/kvhost/kvhost/abi"
)

// Stats count what a role's guests were asked and what it cost.
type Stats struct {
	Role    abi.Role
	Module  string
	Digest  string
	Calls   uint64        // crossings into the guest
	Records uint64        // events, candidates, queries or planes handed over
	Time    time.Duration // spent in the guest; short calls are sampled
	Fuel    uint64        // that modules used, about one unit per instruction; 0 when native
	Faults  uint64
	Builtin bool // the built-in policy answers at present
}

// meter is the running form of Stats; it may be read while the role works.
type meter struct {
	busy    bool // set once: short calls are sampled
	calls   atomic.Uint64
	records atomic.Uint64
	nanos   atomic.Int64
	fuel    atomic.Uint64
	builtin atomic.Bool
	faults  atomic.Uint64
}

// Reading the clock twice costs more than a short call does, so of the calls of a busy role that carry fewer than
// fewRecords records only one in sampled is timed, and counts for all of them.
const (
	fewRecords = 8
	sampled    = 16
	setup      = -1 // "records" of a call that prepares an instance: always timed
)

var epoch = time.Now()

// nanotime is the monotonic clock; cheaper than time.Now, which reads two clocks.
func nanotime() int64 { return int64(time.Since(epoch)) }

// timing is a call under way; weight 0 means that it is not timed.
type timing struct{ start, weight int64 }

func (t *meter) begin(records int) timing {
	calls := t.calls.Add(1)
	if records > 0 {
		t.records.Add(uint64(records))
	}
	if !t.busy || records == setup || records >= fewRecords {
		return timing{nanotime(), 1}
	}
	if calls%sampled == 0 {
		return timing{nanotime(), sampled}
	}
	return timing{}
}

func (t *meter) done(c timing) {
	if c.weight > 0 {
		t.nanos.Add(max(0, nanotime()-c.start-clockCost) * c.weight)
	}
}

// clockCost is what two readings of the clock are apart when nothing is between them: not the guest's time, and for a
// native one that answers in a few nanoseconds it would be most of it.
var clockCost = func() int64 {
	least := int64(1000)
	for range 64 {
		start := nanotime()
		least = min(least, nanotime()-start)
	}
	return least
}()

func (t *meter) spend(fuel uint64) { t.fuel.Add(fuel) }

func (t *meter) stats(m *Module, role abi.Role) Stats {
	return Stats{
		Role: role, Module: m.name, Digest: m.digest,
		Calls: t.calls.Load(), Records: t.records.Load(), Time: time.Duration(t.nanos.Load()), Fuel: t.fuel.Load(), Faults: t.faults.Load(), Builtin: t.builtin.Load(),
	}
}
