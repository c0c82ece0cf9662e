package transfer

import (
	"sync"

	"github.com/kvhost/kvhost/gds"
)

// ChunkError is a failed chunk of a job, by its index in the job.
type ChunkError struct {
	Chunk int
	Err   error
}

// Outcome is the result of a job. Chunks that are not in Failed were delivered in full.
type Outcome struct {
	Bytes  int64 // page bytes of the chunks that did not fail
	Failed []ChunkError
}

// fence is the state that a job's tasks share: whether a task may touch the pages, and which chunks are settled.
//
// A chunk is *settled* when its task will not touch the pages again, and *done* when its task has ended. The fence
// closes when no task is inside and every chunk is settled; then onFence runs, once. onDone runs once, after onFence
// has returned and every task has ended. Both run on the goroutine that made them due, so they must not block.
type fence struct {
	onFence func(Outcome)
	onDone  func(Outcome)
	fenced  chan struct{}
	flag    *gds.Flag // stops the GPU's copies for the job; nil for host memory

	mu      sync.Mutex
	shut    bool // no task may enter
	closed  bool // the fence is closed: onFence has been called, or is being called
	inside  int  // tasks that are touching pages
	open    int  // chunks that are not settled
	running int  // tasks that have not ended, plus one for onFence
	chunks  []chunkState
}

type chunkState struct {
	settled bool
	err     error
	bytes   int64
}

func newFence(chunks int, onFence, onDone func(Outcome)) *fence {
	return &fence{
		onFence: onFence, onDone: onDone, fenced: make(chan struct{}),
		open: chunks, running: chunks + 1, chunks: make([]chunkState, chunks),
	}
}

// enter asks to touch the pages. If it returns true, leave must follow.
func (f *fence) enter() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.shut {
		return false
	}
	f.inside++
	return true
}

// isShut reports whether no task may enter any more.
func (f *fence) isShut() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.shut
}

func (f *fence) leave() {
	f.mu.Lock()
	f.inside--
	f.unlockAndFence()
}

// settle records that chunk i's task will not touch the pages again. Later calls for the same chunk have no effect:
// after a cancel the chunk has failed, whatever its task reports.
func (f *fence) settle(i int, err error, bytes int64) {
	f.mu.Lock()
	if c := &f.chunks[i]; !c.settled {
		*c = chunkState{settled: true, err: err, bytes: bytes}
		f.open--
	}
	f.unlockAndFence()
}

// fail records an error of a settled chunk: a store that read its pages and failed to write its file.
func (f *fence) fail(i int, err error) {
	f.mu.Lock()
	if c := &f.chunks[i]; c.err == nil {
		c.err = err
	}
	f.mu.Unlock()
}

// taskDone records that a chunk's task has ended.
func (f *fence) taskDone() {
	f.mu.Lock()
	f.running--
	last := f.running == 0
	var out Outcome
	if last {
		out = f.outcome()
	}
	f.mu.Unlock()
	if last && f.onDone != nil {
		f.onDone(out)
	}
}

func (f *fence) cancel() {
	f.mu.Lock()
	f.shut = true
	if f.flag != nil && !f.closed {
		f.flag.Set()
	}
	for i := range f.chunks {
		if c := &f.chunks[i]; !c.settled {
			*c = chunkState{settled: true, err: ErrCancelled}
			f.open--
		}
	}
	f.unlockAndFence()
}

// unlockAndFence closes the fence if it is due. The caller holds mu, which it releases.
func (f *fence) unlockAndFence() {
	if f.closed || f.inside > 0 || f.open > 0 {
		f.mu.Unlock()
		return
	}
	f.closed, f.shut = true, true
	if f.flag != nil { // no task is inside or can enter
		f.flag.Release()
	}
	out := f.outcome()
	f.mu.Unlock()
	f.onFence(out)
	close(f.fenced)
	f.taskDone()
}

func (f *fence) outcome() Outcome {
	var out Outcome
	for i := range f.chunks {
		if err := f.chunks[i].err; err != nil {
			out.Failed = append(out.Failed, ChunkError{Chunk: i, Err: err})
		} else {
			out.Bytes += f.chunks[i].bytes
		}
	}
	return out
}
