package server

import (
	"slices"
	"sync/atomic"
	"time"
)

// Answer is a kind of answer that a client waits for.
type Answer uint8

const (
	AnswerLookup         Answer = iota
	AnswerLoad                  // from LOAD to LoadDone
	AnswerStoreRead             // from STORE to StoreRead, when the engine may reuse its blocks
	AnswerStorePublished        // from STORE to StorePublished
	answers
)

func (a Answer) String() string {
	return [...]string{"lookup", "load", "store_read", "store_published"}[a]
}

// LatencyBounds are the upper bounds of the latency buckets in seconds. One further bucket counts longer times.
var LatencyBounds = [...]float64{
	10e-6, 20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30,
}

// histogram counts latencies.
type histogram struct {
	nanoseconds atomic.Int64
	buckets     [len(LatencyBounds) + 1]atomic.Uint64
}

// Latencies are the histograms of all kinds of answers. The zero value is ready.
type Latencies struct{ of [answers]histogram }

// Observe records that an answer was sent to a message received at since.
func (l *Latencies) Observe(a Answer, since time.Time) {
	took := max(0, time.Since(since))
	i, _ := slices.BinarySearch(LatencyBounds[:], took.Seconds())
	h := &l.of[a]
	h.buckets[i].Add(1)
	h.nanoseconds.Add(int64(took))
}

// Latency is a reading of one histogram.
type Latency struct {
	Answer  Answer
	Count   uint64
	Sum     time.Duration
	Buckets [len(LatencyBounds) + 1]uint64 // not cumulative
}

// Read returns all histograms. Count is the sum of the buckets. Sum may include an answer that Count does not include yet.
func (l *Latencies) Read() []Latency {
	list := make([]Latency, answers)
	for a := range list {
		h, out := &l.of[a], &list[a]
		out.Answer, out.Sum = Answer(a), time.Duration(h.nanoseconds.Load())
		for i := range h.buckets {
			out.Buckets[i] = h.buckets[i].Load()
			out.Count += out.Buckets[i]
		}
	}
	return list
}
