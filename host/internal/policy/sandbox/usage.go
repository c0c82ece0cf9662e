package sandbox

import (
	"sync/atomic"
	"time"
)

// Usage counts calls into guests, their cost, and the guests' memory. It may be read during calls.
type Usage struct {
	Sampled bool // times only some of the short calls; set once
	Builtin atomic.Bool
	Faults  atomic.Uint64
	Memory  atomic.Uint64 // bytes of the guests' memory
	Calls   atomic.Uint64
	Records atomic.Uint64 // records handed over
	Nanos   atomic.Int64  // time in guests
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

// timing is a call in progress. With weight 0 it is not timed.
type timing struct{ start, weight int64 }

// Begin counts a call and starts to time it. records is the number of the call's records, or [Setup].
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

// clockCost is the difference of two successive readings, which is subtracted from a call's time. For a native guest
// that answers in a few nanoseconds it would be most of that time.
var clockCost = func() int64 {
	least := int64(1000)
	for range 64 {
		start := nanotime()
		least = min(least, nanotime()-start)
	}
	return least
}()
