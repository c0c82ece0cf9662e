package client

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/kvhost/kvhost/host/proto"
)

// Words are 64-bit words of this process' memory that the host reads and writes, too: jobs are put in order by them, without
// a message in between. See [Timeline].
type Words struct {
	words []uint64 // nil in memory of a GPU

	// Of those, set by Access.
	load  func(i int) uint64
	store func(i int, v uint64)
}

// ShareWords shares words in an arena, from an offset on that is a multiple of 8. A session shares words once.
func (s *Session) ShareWords(ctx context.Context, a *Arena, offset int64, count int) (*Words, error) {
	if offset < 0 || offset%8 != 0 || count < 1 || offset > int64(len(a.data))-8*int64(count) {
		return nil, fmt.Errorf("%w: %d words from %d on do not fit %d bytes", ErrArena, count, offset, len(a.data))
	}
	tag, err := s.pass(ctx, a)
	if err != nil {
		return nil, err
	}
	m := &proto.Words{Handle: &proto.Words_Memfd{Memfd: tag}, Offset: uint64(offset), Count: uint32(count)}
	if _, err := s.ask(ctx, &proto.ClientMessage{Body: &proto.ClientMessage_Words{Words: m}}); err != nil {
		return nil, err
	}
	return &Words{words: unsafe.Slice((*uint64)(unsafe.Pointer(&a.data[offset])), count)}, nil
}

// ShareDeviceWords shares words in memory of cuMemCreate on the session's GPU, from an offset on in its segments. The result
// names them in timelines; to this package the memory is closed. Unless [Words.Access] opens it, whoever waits for them finds
// out about a refused job by its error and about the host's death by Session.Ended, and writes what is to be written itself.
func (s *Session) ShareDeviceWords(ctx context.Context, segments []Segment, offset int64, count int) (*Words, error) {
	vmm, err := s.passSegments(ctx, segments)
	if err != nil {
		return nil, err
	}
	m := &proto.Words{Handle: &proto.Words_CudaVmm{CudaVmm: vmm}, Offset: uint64(offset), Count: uint32(count)}
	if _, err := s.ask(ctx, &proto.ClientMessage{Body: &proto.ClientMessage_Words{Words: m}}); err != nil {
		return nil, err
	}
	return &Words{}, nil
}

// Access says how words in a GPU's memory are read and written here: then those of a job that was refused, or whose host has
// died, are advanced as words of host memory are. It is called before a job names them. The functions are called on the
// session's own goroutine, so they must not wait for another answer of the host.
func (w *Words) Access(load func(i int) uint64, store func(i int, v uint64)) {
	w.load, w.store = load, store
}

// closed says that the words cannot be reached from here.
func (w *Words) closed() bool { return w.words == nil && w.store == nil }

// Load reads a word.
func (w *Words) Load(i int) uint64 {
	if w.load != nil {
		return w.load(i)
	}
	return atomic.LoadUint64(&w.words[i])
}

// Store writes a word.
func (w *Words) Store(i int, v uint64) {
	if w.store != nil {
		w.store(i, v)
		return
	}
	atomic.StoreUint64(&w.words[i], v)
}

// Wait returns when a word has the value, or a higher one. Words of jobs get there also when the job fails and when the host
// dies.
func (w *Words) Wait(ctx context.Context, i int, v uint64) error {
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

// Values of a status word.
const (
	StatusOpen   = 0 // as the client sets it
	StatusDone   = 1 // all blocks were read or delivered
	StatusFailed = 2 // some were not: the job's result says which
)

// Timeline puts a job in order by the session's words. Two jobs in flight have different done and status words, and these
// are set by the client before the job begins.
type Timeline struct {
	Words     *Words
	WaitWord  int
	WaitValue uint64 // no copy of the job begins before WaitWord has it; 0: at once
	DoneWord  int
	// DoneValue is in DoneWord when no copy of the job can touch its blocks any more, however it ended. Of a layer-wise load
	// of n layers, DoneValue - n + i is there when the i-th has landed. When the host dies it is written here.
	DoneValue  uint64
	StatusWord int // -1: none. A layer-wise load has one for each layer
	Layers     int // of a layer-wise load, else 0
}

func (t *Timeline) message() *proto.Timeline {
	if t == nil {
		return nil
	}
	m := &proto.Timeline{WaitWord: uint32(t.WaitWord), WaitValue: t.WaitValue, DoneWord: uint32(t.DoneWord), DoneValue: t.DoneValue}
	if t.StatusWord >= 0 {
		status := uint32(t.StatusWord)
		m.StatusWord = &status
	}
	return m
}

// check refuses what names words that are not there, before anybody waits for them.
func (t *Timeline) check() error {
	switch {
	case t == nil:
		return nil
	case t.Words == nil:
		return fmt.Errorf("%w: timeline: no words", ErrInvalid)
	case t.WaitWord < 0 || t.DoneWord < 0 || t.Layers < 0:
		return fmt.Errorf("%w: timeline: words %d and %d, %d layers", ErrInvalid, t.WaitWord, t.DoneWord, t.Layers)
	case t.Words.words == nil:
		return nil
	}
	if last := max(t.WaitWord, t.DoneWord, t.StatusWord+max(1, t.Layers)-1); last >= len(t.Words.words) {
		return fmt.Errorf("%w: timeline: word %d of %d", ErrInvalid, last, len(t.Words.words))
	}
	return nil
}

// abandon writes what the host will not: whoever waits for the words goes on, and finds that the job failed.
func (t *Timeline) abandon() {
	if t == nil || t.Words.closed() || t.Words.Load(t.DoneWord) >= t.DoneValue {
		return
	}
	if t.StatusWord >= 0 {
		for i := range max(1, t.Layers) {
			if w := t.StatusWord + i; t.Words.Load(w) == StatusOpen {
				t.Words.Store(w, StatusFailed)
			}
		}
	}
	t.Words.Store(t.DoneWord, t.DoneValue)
}
