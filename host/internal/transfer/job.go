package transfer

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

// Handle is a submitted job.
type Handle struct {
	fence   *fence
	layered *layered // nil unless it is a layer-wise load
	begin   func()   // queues the job's tasks, once
}

// Begin starts a job that is held. It has no effect on other jobs, or when called again.
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

// Fenced is closed when nothing of the job can touch the client's pages any more.
func (h *Handle) Fenced() <-chan struct{} { return h.fence.fenced }
