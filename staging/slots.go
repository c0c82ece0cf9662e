package staging

import (
	"context"
	"errors"
	"fmt"
	"sync"
)

// Pinner registers memory with a device. The GPU's page-locking is one.
type Pinner interface {
	Register(mem []byte) error
	Unregister(mem []byte) error
}

// Slots is a fixed pool of equal buffers, mapped outside the Go heap, aligned to [Align] and in huge pages if possible.
// Free slots are reused last in, first out, so that a pool touches no more memory than it needs. Waiters are served in
// order of arrival, by the order of receivers of a channel.
type Slots struct {
	memory *Mapping
	mem    []byte // memory of all slots
	slots  []Slot
	turns  chan struct{} // one for each free slot
	over   chan struct{} // closed by Close

	mu      sync.Mutex
	free    []*Slot
	closed  bool
	pinners []Pinner
}

// Slot is one buffer. It belongs to the caller that acquired it until it is released.
type Slot struct {
	pool *Slots
	mem  []byte
	out  bool // acquired and not released; guarded by pool.mu
}

// NewSlots maps count slots of the given bytes each, rounded up to [Align]. Their pages are allocated when they are
// touched, except [HugePages], which are reserved at once.
func NewSlots(count, bytes int) (*Slots, error) {
	if count < 1 || bytes < 1 || bytes > 1<<40 {
		return nil, fmt.Errorf("staging: %d slots of %d bytes: want at least one of each", count, bytes)
	}
	bytes = (bytes + Align - 1) &^ (Align - 1)
	if count > (1<<47)/bytes {
		return nil, fmt.Errorf("staging: %d slots of %d bytes do not fit an address space", count, bytes)
	}
	total := count * bytes
	memory, err := Map(total)
	if err != nil {
		return nil, fmt.Errorf("staging: %d slots of %d bytes: %w", count, bytes, err)
	}
	s := &Slots{
		memory: memory, mem: memory.Bytes(), slots: make([]Slot, count), free: make([]*Slot, count),
		turns: make(chan struct{}, count), over: make(chan struct{}),
	}
	for i := range s.slots {
		s.slots[i] = Slot{pool: s, mem: s.mem[i*bytes : (i+1)*bytes : (i+1)*bytes]}
		s.free[count-1-i] = &s.slots[i]
		s.turns <- struct{}{}
	}
	return s, nil
}

// Register registers all the memory with a pinner, and unregisters it before it is unmapped.
func (s *Slots) Register(p Pinner) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return ErrClosed
	}
	if err := p.Register(s.mem); err != nil {
		return err
	}
	s.pinners = append(s.pinners, p)
	return nil
}

// Pages is the kind of pages of the slots' memory.
func (s *Slots) Pages() Pages { return s.memory.Pages() }

// Near binds the slots' memory to NUMA nodes: see [Mapping.Near].
func (s *Slots) Near(nodes ...int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return ErrClosed
	}
	return s.memory.Near(nodes...)
}

// Capacity is the number of slots.
func (s *Slots) Capacity() int { return len(s.slots) }

// InUse is the number of slots in use.
func (s *Slots) InUse() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.slots) - len(s.free)
}

// TryAcquire takes a slot if one is free.
func (s *Slots) TryAcquire() (*Slot, bool) {
	select {
	case <-s.turns:
		slot, err := s.take()
		return slot, err == nil
	default:
		return nil, false
	}
}

// take takes a free slot. The caller has a turn.
func (s *Slots) take() (*Slot, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, ErrClosed
	}
	slot := s.free[len(s.free)-1]
	s.free = s.free[:len(s.free)-1]
	slot.out = true
	return slot, nil
}

// Acquire takes a slot and waits for one if necessary, in order of arrival. It fails with the context's error or
// [ErrClosed].
func (s *Slots) Acquire(ctx context.Context) (*Slot, error) {
	if slot, ok := s.TryAcquire(); ok {
		return slot, nil
	}
	select {
	case <-s.turns:
		return s.take()
	case <-s.over:
		return nil, ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Bytes is the slot's memory. It must not be touched after Release.
func (t *Slot) Bytes() []byte { return t.mem }

// Release returns the slot to the pool. A second Release would give one memory to two users, so it panics.
func (t *Slot) Release() {
	s := t.pool
	s.mu.Lock()
	defer s.mu.Unlock()
	if !t.out {
		panic("staging: slot released twice")
	}
	t.out = false
	s.free = append(s.free, t)
	s.turns <- struct{}{} // does not block: there are never more turns than slots
	if s.closed && len(s.free) == len(s.slots) {
		_ = s.unmap() // Close has returned, and no caller is left for the error
	}
}

// Close closes the pool: waiters get [ErrClosed]. A device may still read or write slots in use, so then Close returns
// [ErrSlotsOut], and the last Release unmaps the memory.
func (s *Slots) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return ErrClosed
	}
	s.closed = true
	close(s.over)
	if out := len(s.slots) - len(s.free); out > 0 {
		return fmt.Errorf("%w: %d of %d", ErrSlotsOut, out, len(s.slots))
	}
	return s.unmap()
}

func (s *Slots) unmap() error {
	var errs []error
	for i := len(s.pinners) - 1; i >= 0; i-- {
		errs = append(errs, s.pinners[i].Unregister(s.mem))
	}
	errs = append(errs, s.memory.Unmap())
	s.mem, s.pinners = nil, nil
	return errors.Join(errs...)
}
