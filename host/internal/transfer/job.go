package transfer

import (
	"sync"

	"github.com/kvhost/kvhost/staging"
)

// Handle is a submitted job.
type Handle struct {
	fence   *fence
	layered *layered // nil unless the job is a layer-wise load
	begin   func()   // queues the job's tasks, once
}

// newHandle returns the handle of a job, which begins now unless it is held.
func newHandle(f *fence, layered *layered, held bool, begin func()) *Handle {
	h := &Handle{fence: f, layered: layered}
	if held {
		h.begin = sync.OnceFunc(begin)
	} else {
		begin()
	}
	return h
}

// Begin starts a held job. It has no effect on other jobs, or when called again.
func (h *Handle) Begin() {
	if h.begin != nil {
		h.begin()
	}
}

// Cancel shuts the job's fence: chunks that were not delivered fail with ErrCancelled. It does not wait.
func (h *Handle) Cancel() {
	h.fence.cancel()
	h.Begin() // the tasks find the fence shut and end
	if h.layered != nil {
		h.layered.submitDue()
	}
}

// Fenced is closed when no task of the job can touch the client's pages any more.
func (h *Handle) Fenced() <-chan struct{} { return h.fence.fenced }

// Load queues a job.
func (q *Queue) Load(l *LoadJob) *Handle {
	f := newFence(len(l.Chunks), l.Done, nil)
	spec := *l
	spec.Memory = f.flagged(l.Memory)
	if len(l.Chunks) == 0 {
		f.cancel()
	}
	begin := func() {
		g := spec.Memory.Geometry()
		for i := range spec.Chunks {
			t := &loadTask{queue: q, spec: &spec, index: i, loading: loading{pieceReader: newReader(q, f, &spec, i)}}
			spec.Lease.Approach(spec.Chunks[i].Index)
			lane := spec.Lease.Root(spec.Chunks[i].Index)
			if q.workers.SubmitTo(lane, spec.Tenant, staging.Read, g.PageBytes(), t.run) != nil {
				t.end(ErrClosed)
			}
		}
	}
	if l.Layers != nil {
		layered := q.loadLayers(f, &spec)
		return newHandle(f, layered, l.Held, layered.begin)
	}
	return newHandle(f, nil, l.Held, begin)
}
