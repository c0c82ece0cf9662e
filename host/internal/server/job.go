package server

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/transfer"
)

// job is a STORE or LOAD from the moment it is received. A CANCEL may come while the job is queued, or while a STORE waits for
// space. The first caller of claim decides the outcome of the job: copies, refusal or cancellation.
type job struct {
	id      uint64
	session *session
	message *proto.SessionRequest
	since   time.Time // time at which the message was received
	span    requestSpan
	ctx     context.Context // done when the job is cancelled
	stop    context.CancelFunc
	abandon func(*job)    // completes a job that was cancelled before any part of it ran
	reg     *registration // set before started is closed

	cancelled atomic.Bool
	expired   atomic.Bool // the job waited too long for its semaphore
	claimed   atomic.Bool
	// started is closed after the claim. By then either handle is set, or no copy will ever start and the job's semaphores have
	// been written.
	started chan struct{}
	handle  *transfer.Handle // nil if no copy was started
}

// claim reports whether the caller is the first to claim the job. If so, the caller must then call run or neverRun.
func (j *job) claim() bool { return j.claimed.CompareAndSwap(false, true) }

// run sets the handle of the job after its copies were submitted.
func (j *job) run(h *transfer.Handle) {
	j.handle = h
	close(j.started)
	if j.cancelled.Load() { // cancelled between the claim and now
		h.Cancel()
	}
}

// neverRun records that no copy will start. The caller must have written the client's semaphores before, because the session
// may unmap them afterwards.
func (j *job) neverRun() { close(j.started) }

// running returns the handle, or nil before run.
func (j *job) running() *transfer.Handle {
	select {
	case <-j.started:
		return j.handle
	default:
		return nil
	}
}

// cancel cancels the job without waiting. An unclaimed job completes here, even if its reservation hangs in the store.
func (j *job) cancel() {
	j.cancelled.Store(true)
	if j.claim() {
		j.session.reserving.Remove(j.id)
		j.abandon(j)
		j.neverRun()
		return
	}
	j.stop()
	if h := j.running(); h != nil { // if there is no handle yet, run cancels it
		h.Cancel()
	}
}

// expire ends a job that has waited too long for its semaphore.
func (j *job) expire() {
	j.expired.Store(true)
	j.handle.Cancel()
}

// cause returns the reason for the failure of a chunk: err, or errWaited if the job has expired.
func (j *job) cause(err error) error {
	if j.expired.Load() && !j.cancelled.Load() && errors.Is(err, transfer.ErrCancelled) {
		return errWaited
	}
	return err
}

// waitFenced waits until no copy of the job can touch its blocks.
func (j *job) waitFenced() {
	<-j.started
	if j.handle != nil {
		<-j.handle.Fenced()
	}
}

// fenced reports whether no copy of the job can touch its blocks.
func (j *job) fenced() bool {
	select {
	case <-j.started:
	default:
		return false
	}
	if j.handle == nil {
		return true
	}
	select {
	case <-j.handle.Fenced():
		return true
	default:
		return false
	}
}

// refuse removes a job from the table before any part of it has started. It returns false if a cancellation has already
// completed and answered the job. For a nil job, which stands for any other message, it returns true.
func (j *job) refuse() bool {
	if j == nil {
		return true
	}
	if !j.claim() {
		return false
	}
	j.neverRun()
	j.finish()
	return true
}

// finish removes a completed job from the table.
func (j *job) finish() {
	j.stop()
	j.session.jobs.remove(j.id)
}
