package transfer

import (
	"sync"

	"github.com/kvhost/kvhost/gds"
)

// ChunkError is one chunk of a job that failed, by its place in the job.
type ChunkError struct {
	Chunk int
	Err   error
}

// Outcome is how a job ended. Chunks not in Failed were delivered in full.
type Outcome struct {
	Bytes  int64 // page bytes of the chunks that did not fail
	Failed []ChunkError
}

// Handle is a submitted job.
type Handle struct {
	j       *job
	layered *layered // nil unless it is a layer-wise load
	begin   func()   // queues the job's tasks, once
}

// Begin lets a job that is held begin. Further calls, and those for other jobs, do nothing.
func (h *Handle) Begin() {
	if h.begin != nil {
		h.begin()
	}
}

// Cancel shuts the job's fence: chunks that are not delivered yet fail with ErrCancelled. It does not wait.
func (h *Handle) Cancel() {
	h.j.cancel()
	h.Begin() // its tasks find the fence shut, and end
	if h.layered != nil {
		h.layered.pump()
	}
}

// Advance says that the first n layers of a layer-wise load have been consumed. See [Layers].
func (h *Handle) Advance(n int) {
	if h.layered != nil {
		h.layered.advance(n)
	}
}

// Fenced is closed once nothing of the job can touch the client's pages any more.
func (h *Handle) Fenced() <-chan struct{} { return h.j.fenced }

// job is the state that a job's tasks share: the fence, and which chunks are settled.
//
// A chunk is *settled* when its task will not enter the pages again, and *over* when its task has ended. The fence
// closes when no task is inside and every chunk is settled; onFence runs then, once. onOver runs once, after onFence
// has returned and every task has ended. Both run on the goroutine that made them due, so they must not block.
type job struct {
	onFence func(Outcome)
	onOver  func(Outcome)
	fenced  chan struct{}
	flag    *gds.Flag // stops what a GPU is copying for the job; nil for host memory

	mu      sync.Mutex
	shut    bool // no task may enter
	closed  bool // the fence is closed: onFence has been or is being called
	inside  int  // tasks in the pages now
	open    int  // chunks not settled
	running int  // tasks not ended, and one for onFence
	chunks  []chunkState
}

type chunkState struct {
	settled bool
	err     error
	bytes   int64
}

func newJob(chunks int, onFence, onOver func(Outcome)) *job {
	return &job{
		onFence: onFence, onOver: onOver, fenced: make(chan struct{}),
		open: chunks, running: chunks + 1, chunks: make([]chunkState, chunks),
	}
}

// enter asks to touch the pages; when it says yes, leave must follow.
func (j *job) enter() bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.shut {
		return false
	}
	j.inside++
	return true
}

// isShut says whether no task may enter any more.
func (j *job) isShut() bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.shut
}

func (j *job) leave() {
	j.mu.Lock()
	j.inside--
	j.unlockAndFence()
}

// settle says that chunk i's task will not touch the pages again. Later calls for the same chunk change nothing: after
// a cancel the chunk has failed, whatever its task still finds.
func (j *job) settle(i int, err error, bytes int64) {
	j.mu.Lock()
	if c := &j.chunks[i]; !c.settled {
		*c = chunkState{settled: true, err: err, bytes: bytes}
		j.open--
	}
	j.unlockAndFence()
}

// fail records an error of a chunk that is settled already: a store whose pages were read but whose file failed.
func (j *job) fail(i int, err error) {
	j.mu.Lock()
	if c := &j.chunks[i]; c.err == nil {
		c.err = err
	}
	j.mu.Unlock()
}

// over says that chunk i's task has ended.
func (j *job) over() {
	j.mu.Lock()
	j.running--
	last := j.running == 0
	var out Outcome
	if last {
		out = j.outcome()
	}
	j.mu.Unlock()
	if last && j.onOver != nil {
		j.onOver(out)
	}
}

func (j *job) cancel() {
	j.mu.Lock()
	j.shut = true
	if j.flag != nil && !j.closed {
		j.flag.Set()
	}
	for i := range j.chunks {
		if c := &j.chunks[i]; !c.settled {
			*c = chunkState{settled: true, err: ErrCancelled}
			j.open--
		}
	}
	j.unlockAndFence()
}

// unlockAndFence closes the fence if it is due. It is called with mu held and releases it.
func (j *job) unlockAndFence() {
	if j.closed || j.inside > 0 || j.open > 0 {
		j.mu.Unlock()
		return
	}
	j.closed, j.shut = true, true
	if j.flag != nil { // nobody is inside, nobody can enter
		j.flag.Release()
	}
	out := j.outcome()
	j.mu.Unlock()
	j.onFence(out)
	close(j.fenced)
	j.over()
}

func (j *job) outcome() Outcome {
	var out Outcome
	for i := range j.chunks {
		if err := j.chunks[i].err; err != nil {
			out.Failed = append(out.Failed, ChunkError{Chunk: i, Err: err})
		} else {
			out.Bytes += j.chunks[i].bytes
		}
	}
	return out
}
