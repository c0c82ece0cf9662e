package shadow

import (
	"slices"
	"sync"
	"sync/atomic"

	"github.com/kvhost/kvhost/abi"
)

// Op is what happened to a key.
type Op uint8

const (
	Ask   Op = iota // it was looked up
	Offer           // its chunk was to be stored
	End             // its request is over; there is no key
)

// Step is one event of the live cache.
type Step struct {
	Key, Parent uint64 // fingerprints; Parent is 0 for a prefix's first chunk, and of an Ask known for hits only
	Time        uint64
	Size        uint32 // of the entry, in abi.SizeUnit; of an Ask known for hits only
	Depth       uint32
	Request     uint32
	Tenant      uint32
	Op          Op
	Hit         bool      // Ask: the live cache had it, and granted it
	First       bool      // Ask: the first key of a lookup
	ByPrefix    bool      // Ask: nothing after the first miss is a hit
	Hints       abi.Hints // End
}

// batchSteps bounds a batch.
const batchSteps = 1024

// Batch is a sequence of steps. [Stream.Batch] returns an empty one and [Stream.Send] takes it over.
type Batch struct {
	steps []Step
	users atomic.Int32
}

// Stream passes steps to shadows. The zero value has no shadow: then [Stream.On] is false, and that is its only cost.
type Stream struct {
	mu      sync.Mutex
	shadows atomic.Pointer[[]*Shadow]
}

var batches = sync.Pool{New: func() any { return &Batch{steps: make([]Step, 0, batchSteps)} }}

// On reports whether there is a shadow.
func (s *Stream) On() bool { return len(s.All()) > 0 }

// All are the stream's shadows.
func (s *Stream) All() []*Shadow {
	if list := s.shadows.Load(); list != nil {
		return *list
	}
	return nil
}

// Add adds a shadow.
func (s *Stream) Add(h *Shadow) {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := append(slices.Clone(s.All()), h)
	s.shadows.Store(&list)
}

// Remove removes a shadow, which the caller then closes. It is false when the stream does not have the shadow.
func (s *Stream) Remove(h *Shadow) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := slices.DeleteFunc(slices.Clone(s.All()), func(o *Shadow) bool { return o == h })
	there := len(list) < len(s.All())
	s.shadows.Store(&list)
	return there
}

// Batch returns an empty batch.
func (s *Stream) Batch() *Batch { return batches.Get().(*Batch) }

// Step appends a step, and sends the batch when it is full. It returns the batch for the next step.
func (s *Stream) Step(b *Batch, step Step) *Batch {
	if b.steps = append(b.steps, step); len(b.steps) < batchSteps {
		return b
	}
	s.Send(b)
	return s.Batch()
}

// Send gives a batch to all shadows. It never waits.
func (s *Stream) Send(b *Batch) {
	list := s.All()
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
