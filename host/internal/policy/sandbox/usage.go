package sandbox

import (
	"sync/atomic"
	"time"
)

// Usage counts calls into guests, what they cost, and the memory that guests have. It may be read while calls are made.
type Usage struct {
	Sampled bool // set once: time only some of the short calls
	Builtin atomic.Bool
	Faults  atomic.Uint64
	Memory  atomic.Uint64 // bytes that the guests have
	Calls   atomic.Uint64
	Records atomic.Uint64 // handed over
	Nanos   atomic.Int64  // spent in guests
	Fuel    atomic.Uint64
}

// Reading the clock twice costs more than a short call. So a sampled Usage times only one in sampleEvery of the calls
// that carry fewer than fewRecords records, and counts it for all of them.
const (
	fewRecords  = 8
	sampleEvery = 16
)

var epoch = time.Now()

// nanotime is the monotonic clock. It is cheaper than time.Now, which reads two clocks.
func nanotime() int64 { return int64(time.Since(epoch)) }

// timing is a call in progress. Weight 0 means that it is not timed.
type timing struct{ start, weight int64 }

// Begin counts a call with so many records, or [Setup], and starts to time it.
func (u *Usage) Begin(records int) timing {
	calls := u.Calls.Add(1)
	if records > 0 {
		u.Records.Add(uint64(records))
	}
	if !u.Sampled || records == Setup || records >= fewRecords {
		return timing{nanotime(), 1}
	}
	if calls%sampleEvery == 0 {
		return timing{nanotime(), sampleEvery}
	}
	return timing{}
}

// End adds the time of a call.
func (u *Usage) End(t timing) {
	if t.weight > 0 {
		u.Nanos.Add(max(0, nanotime()-t.start-clockCost) * t.weight)
	}
}

// clockCost is the difference of two readings with nothing between them. It is not the guest's time, and for a native
// guest that answers in a few nanoseconds it would be most of it.
var clockCost = func() int64 {
	least := int64(1000)
	for range 64 {
		start := nanotime()
		least = min(least, nanotime()-start)
	}
	return least
}()
