package server

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/transfer"
)

// job is a STORE or LOAD from the moment it is received. CANCEL may find it while it is queued, or while a STORE
// waits for space. Whoever claims it first decides its outcome: copies, refusal, or cancellation.
type job struct {
	id      uint64
	session *session
	message *proto.SessionRequest
	since   time.Time // when the message was received
	span    requestSpan
	ctx     context.Context // done when it is cancelled
	stop    context.CancelFunc
	abandon func(*job)    // completes the job, which was cancelled before any of it ran
	reg     *registration // set before started is closed

	cancelled atomic.Bool
	expired   atomic.Bool // the semaphore that it waits for came too late
	claimed   atomic.Bool
	// started is closed after the claim: handle is set, or no copy will ever start and the job's semaphores are
	// written.
	started chan struct{}
	handle  *transfer.Handle // nil when no copy was started
}

// claim reports whether the caller is the first. Then run or neverRun must follow.
func (j *job) claim() bool { return j.claimed.CompareAndSwap(false, true) }

// run records the handle of a job after its copies were submitted.
func (j *job) run(h *transfer.Handle) {
	j.handle = h
	close(j.started)
	if j.cancelled.Load() { // cancelled while it was being started
		h.Cancel()
	}
}

// neverRun records that no copy was or will be started. The job must have written the client's semaphores by then,
// because the session may unmap them next.
func (j *job) neverRun() { close(j.started) }

// running returns the handle, nil before run.
func (j *job) running() *transfer.Handle {
	select {
	case <-j.started:
		return j.handle
	default:
		return nil
	}
}

// cancel asks for the end and does not wait. A job without a claim completes here, whatever the store is doing.
func (j *job) cancel() {
	j.cancelled.Store(true)
	if j.claim() {
		j.session.reserving.Remove(j.id)
		j.abandon(j)
		j.neverRun()
		return
	}
	j.stop()
	if h := j.running(); h != nil { // otherwise run cancels it
		h.Cancel()
	}
}

// expire ends a job that is held and waits for its semaphore for too long.
func (j *job) expire() {
	j.expired.Store(true)
	j.handle.Cancel()
}

// cause is why a chunk of the job failed.
func (j *job) cause(err error) error {
	if j.expired.Load() && !j.cancelled.Load() && errors.Is(err, transfer.ErrCancelled) {
		return errWaited
	}
	return err
}

// waitFenced returns when no copy of the job can touch its blocks.
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

// refuse takes a job off the table before any of it started; j is nil for other messages. It reports whether to
// answer with the refusal: not if a cancel has completed the job.
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

// finish takes a completed job off the table.
func (j *job) finish() {
	j.stop()
	j.session.jobs.remove(j.id)
}
