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
	Time    time.Duration // spent in the guest
	Faults  uint64
}

// meter is the running form of Stats; it may be read while the role works.
type meter struct {
	calls   atomic.Uint64
	records atomic.Uint64
	nanos   atomic.Int64
	faults  atomic.Uint64
}

var epoch = time.Now()

// nanotime is the monotonic clock; cheaper than time.Now, which reads two clocks.
func nanotime() int64 { return int64(time.Since(epoch)) }

func (t *meter) add(start int64, records int) {
	t.calls.Add(1)
	t.records.Add(uint64(records))
	t.nanos.Add(nanotime() - start)
}

func (t *meter) stats(m *Module, role abi.Role) Stats {
	return Stats{
		Role: role, Module: m.name, Digest: m.digest,
		Calls: t.calls.Load(), Records: t.records.Load(), Time: time.Duration(t.nanos.Load()), Faults: t.faults.Load(),
	}
}
