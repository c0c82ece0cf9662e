package shadow

import (
	"sync"
	"sync/atomic"

	"github.com/kvhost/kvhost/abi"
)

// Op is the kind of a step.
type Op uint8

const (
	Ask   Op = iota // the key was looked up
	Offer           // the key's chunk was offered
	End             // the request has ended; there is no key
)

// Step is one event of the live cache.
type Step struct {
	Key, Parent uint64 // fingerprints; Parent is 0 for a prefix's first chunk and for an Ask without a hit
	Time        uint64
	Size        uint32 // size of the entry, in abi.SizeUnit; 0 for an Ask without a hit
	Depth       uint32
	Request     uint32
	Tenant      uint32
	Op          Op
	Hit         bool      // Ask: the live cache granted the key
	First       bool      // Ask: the first key of a lookup
	ByPrefix    bool      // Ask: nothing after the first miss is a hit
	Hints       abi.Hints // hints of an End
}

const batchSteps = 1024

// Batch is a sequence of steps, which shadows share.
type Batch struct {
	steps []Step
	users atomic.Int32
}

var batches = sync.Pool{New: func() any { return &Batch{steps: make([]Step, 0, batchSteps)} }}

// On reports whether there is a shadow. Otherwise only Tell and Lookup may be called to pass steps on.
func (s *Set) On() bool { return len(s.List()) > 0 }

func newBatch() *Batch { return batches.Get().(*Batch) }

// step appends a step, and sends the batch when it is full. It returns the batch for the next step.
func (s *Set) step(b *Batch, step Step) *Batch {
	if b.steps = append(b.steps, step); len(b.steps) < batchSteps {
		return b
	}
	s.send(b)
	return newBatch()
}

// send passes a batch to all shadows. It never blocks.
func (s *Set) send(b *Batch) {
	list := s.List()
	b.users.Store(int32(len(list)) + 1)
	for _, h := range list {
		select {
		case h.queue <- b:
		default:
			h.dropped.Add(uint64(len(b.steps)))
			b.release()
		}
	}
	b.release()
}

// release gives a reference back. The last one returns the batch to the pool.
func (b *Batch) release() {
	if b.users.Add(-1) == 0 {
		b.steps = b.steps[:0]
		batches.Put(b)
	}
}
