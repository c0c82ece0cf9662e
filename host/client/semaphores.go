package client

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/kvhost/kvhost/host/proto"
)

// Semaphores are 64-bit counters in this process' memory that the host reads and writes, too: they order jobs without
// a message in between. See [Timeline].
type Semaphores struct {
	values []uint64 // nil in memory of a GPU

	// Of those, set by Access.
	load  func(i int) uint64
	store func(i int, v uint64)
}

// ShareSemaphores shares semaphores in an arena, from an offset on that is a multiple of 8. A session shares
// semaphores once.
func (s *Session) ShareSemaphores(ctx context.Context, a *Arena, offset int64, count int) (*Semaphores, error) {
	if offset < 0 || offset%8 != 0 || count < 1 || offset > int64(len(a.data))-8*int64(count) {
		return nil, fmt.Errorf("%w: %d semaphores from %d on do not fit %d bytes", ErrArena, count, offset, len(a.data))
	}
	tag, err := s.pass(ctx, a)
	if err != nil {
		return nil, err
	}
	m := &proto.Semaphores{Handle: &proto.Semaphores_Memfd{Memfd: tag}, Offset: uint64(offset), Count: uint32(count)}
	if _, err := s.ask(ctx, &proto.ClientMessage{Body: &proto.ClientMessage_Semaphores{Semaphores: m}}); err != nil {
		return nil, err
	}
	return &Semaphores{values: unsafe.Slice((*uint64)(unsafe.Pointer(&a.data[offset])), count)}, nil
}

// ShareDeviceSemaphores shares semaphores in memory of cuMemCreate on the session's GPU, from an offset on in its
// segments. The result names them in timelines; to this package the memory is closed. Unless [Semaphores.Access]
// opens it, whoever waits for them finds out about a refused job by its error and about the host's death by
// Session.Ended, and writes what is to be written itself.
func (s *Session) ShareDeviceSemaphores(ctx context.Context, segments []Segment, offset int64,
	count int) (*Semaphores, error) {
	vmm, err := s.passSegments(ctx, segments)
	if err != nil {
		return nil, err
	}
	m := &proto.Semaphores{Handle: &proto.Semaphores_CudaVmm{CudaVmm: vmm}, Offset: uint64(offset),
		Count: uint32(count)}
	if _, err := s.ask(ctx, &proto.ClientMessage{Body: &proto.ClientMessage_Semaphores{Semaphores: m}}); err != nil {
		return nil, err
	}
	return &Semaphores{}, nil
}

// Access says how semaphores in a GPU's memory are read and written here: then those of a job that was refused, or
// whose host has died, are advanced as semaphores of host memory are. It is called before a job names them. The
// functions are called on the session's own goroutine, so they must not wait for another answer of the host.
func (w *Semaphores) Access(load func(i int) uint64, store func(i int, v uint64)) {
	w.load, w.store = load, store
}

// closed says that the semaphores cannot be reached from here.
func (w *Semaphores) closed() bool { return w.values == nil && w.store == nil }

// Load reads a semaphore.
func (w *Semaphores) Load(i int) uint64 {
	if w.load != nil {
		return w.load(i)
	}
	return atomic.LoadUint64(&w.values[i])
}

// Store writes a semaphore.
func (w *Semaphores) Store(i int, v uint64) {
	if w.store != nil {
		w.store(i, v)
		return
	}
	atomic.StoreUint64(&w.values[i], v)
}

// Wait returns when a semaphore has the value, or a higher one. Semaphores of jobs get there also when the job fails
// and when the host dies.
func (w *Semaphores) Wait(ctx context.Context, i int, v uint64) error {
	pause := time.NewTimer(0)
	defer pause.Stop()
	for w.Load(i) < v {
		pause.Reset(50 * time.Microsecond)
		select {
		case <-pause.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// Values of a status semaphore.
const (
	StatusOpen   = 0 // as the client sets it
	StatusDone   = 1 // all blocks were read or delivered
	StatusFailed = 2 // some were not: the job's result says which
)

// Timeline puts a job in order by the session's semaphores. Two jobs in flight have different done and status
// semaphores, and these are set by the client before the job begins.
type Timeline struct {
	Semaphores *Semaphores
	Wait       int
	WaitValue  uint64 // no copy of the job begins before Wait has it; 0: at once
	Done       int
	// DoneValue is in Done when no copy of the job can touch its blocks any more, however it ended. Of a layer-wise
	// load of n layers, DoneValue - n + i is there when the i-th has landed. When the host dies it is written here.
	DoneValue uint64
	Status    int // -1: none. A layer-wise load has one for each layer
	Layers    int // of a layer-wise load, else 0
}

func (t *Timeline) message() *proto.Timeline {
	if t == nil {
		return nil
	}
	m := &proto.Timeline{Wait: uint32(t.Wait), WaitValue: t.WaitValue, Done: uint32(t.Done), DoneValue: t.DoneValue}
	if t.Status >= 0 {
		status := uint32(t.Status)
		m.Status = &status
	}
	return m
}

// check refuses what names semaphores that are not there, before anybody waits for them.
func (t *Timeline) check() error {
	switch {
	case t == nil:
		return nil
	case t.Semaphores == nil:
		return fmt.Errorf("%w: timeline: no semaphores", ErrInvalid)
	case t.Wait < 0 || t.Done < 0 || t.Layers < 0:
		return fmt.Errorf("%w: timeline: semaphores %d and %d, %d layers", ErrInvalid, t.Wait, t.Done, t.Layers)
	case t.Semaphores.values == nil:
		return nil
	}
	if last := max(t.Wait, t.Done, t.Status+max(1, t.Layers)-1); last >= len(t.Semaphores.values) {
		return fmt.Errorf("%w: timeline: semaphore %d of %d", ErrInvalid, last, len(t.Semaphores.values))
	}
	return nil
}

// abandon writes what the host will not: whoever waits for the semaphores goes on, and finds that the job failed.
func (t *Timeline) abandon() {
	if t == nil || t.Semaphores.closed() || t.Semaphores.Load(t.Done) >= t.DoneValue {
		return
	}
	if t.Status >= 0 {
		for i := range max(1, t.Layers) {
			if w := t.Status + i; t.Semaphores.Load(w) == StatusOpen {
				t.Semaphores.Store(w, StatusFailed)
			}
		}
	}
	t.Semaphores.Store(t.Done, t.DoneValue)
}
