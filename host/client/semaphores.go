package client

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/kvhost/kvhost/host/internal/proto"
)

// Semaphores are timeline semaphores: 64-bit counters in this process's memory that the host also reads and writes.
// They order jobs without a message. See [Timeline].
type Semaphores struct {
	values []uint64 // nil in memory of a GPU
}

// ShareSemaphores shares semaphores in an arena, at an offset that is a multiple of 8. A session can share
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
	if _, err := s.ask(ctx, &proto.SessionRequest{Body: &proto.SessionRequest_Semaphores{Semaphores: m}}); err != nil {
		return nil, err
	}
	return &Semaphores{values: unsafe.Slice((*uint64)(unsafe.Pointer(&a.data[offset])), count)}, nil
}

// ShareDeviceSemaphores shares semaphores in memory of the session's GPU. The arguments are the result of cuIpcGetMemHandle and an offset
// in its allocation. Timelines can name these semaphores, but this package cannot access them. The caller must write the semaphores of a
// refused job, and those of all jobs after the host's death (see Session.Ended).
func (s *Session) ShareDeviceSemaphores(ctx context.Context, handle []byte, offset int64, count int) (*Semaphores, error) {
	m := &proto.Semaphores{Handle: &proto.Semaphores_CudaIpc{CudaIpc: handle}, Offset: uint64(offset), Count: uint32(count)}
	if _, err := s.ask(ctx, &proto.SessionRequest{Body: &proto.SessionRequest_Semaphores{Semaphores: m}}); err != nil {
		return nil, err
	}
	return &Semaphores{}, nil
}

// Load reads a semaphore in an arena.
func (w *Semaphores) Load(i int) uint64 { return atomic.LoadUint64(&w.values[i]) }

// Store writes a semaphore in an arena.
func (w *Semaphores) Store(i int, v uint64) { atomic.StoreUint64(&w.values[i], v) }

// Wait returns when a semaphore in an arena has reached a value. A job's semaphores reach their values even if the job fails or
// the host dies.
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
	StatusOpen   = 0 // set by the client
	StatusDone   = 1 // some blocks were not: see the job's result
	StatusFailed = 2 // some were not: see the job's result
)

// Timeline orders a job by the session's semaphores, which are given by index. Two jobs in flight must have different
// done and status semaphores. The client must reset the status semaphores before the job starts.
type Timeline struct {
	Semaphores *Semaphores
	Wait       int
	WaitValue  uint64 // no copy starts before semaphore Wait has this value; 0 means at once
	Done       int
	// Semaphore Done reaches DoneValue when no copy of the job can touch its blocks any more, regardless of the result.
	// A layer-wise load of n layers sets it to DoneValue - n + i when layer i has arrived. If the host dies, this
	// package writes DoneValue.
	DoneValue uint64
	Status    int // -1 means none; a layer-wise load has one for each layer, starting here
	Layers    int // layers of a layer-wise load; 0 for other jobs
}

func (t *Timeline) message() *proto.Timeline {
	if t == nil {
		return nil
	}
	m := &proto.Timeline{Done: uint32(t.Done), DoneValue: t.DoneValue}
	if t.WaitValue != 0 {
		wait := uint32(t.Wait)
		m.Wait, m.WaitValue = &wait, t.WaitValue
	}
	if t.Status >= 0 {
		status := uint32(t.Status)
		m.Status = &status
	}
	return m
}

// check refuses semaphores that do not exist, because a wait for them would never end.
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

// abandon writes the values that the host can no longer write, so that waiters wake up and see that the job failed.
func (t *Timeline) abandon() {
	if t == nil || t.Semaphores.values == nil || t.Semaphores.Load(t.Done) >= t.DoneValue {
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
