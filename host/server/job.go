package server

import (
	"context"
	"slices"
	"sync/atomic"

	"github.com/kvhost/kvhost/host/proto"
	"github.com/kvhost/kvhost/host/transfer"
)

// job is a STORE or LOAD from the moment it is heard. CANCEL may find it before its turn has come, or while a STORE makes
// room. Who claims it first decides what becomes of it: the copies that it is for, its refusal, or its cancel.
type job struct {
	id      uint64
	session *session
	message *proto.ClientMessage
	ctx     context.Context // done when it is cancelled
	stop    context.CancelFunc
	reg     *registration // set before begun is closed

	cancelled atomic.Bool
	claimed   atomic.Bool
	consumed  atomic.Uint32 // layers, of a LOAD with a prefetch
	begun     chan struct{} // closed after the claim: handle is set, or never will be and the job's semaphores are written
	handle    fence         // nil when no copy was ever started
}

// newJob enters a job in the session's table, so that CANCEL, FLUSH and the session's end know of it.
func (x *session) newJob(m *proto.ClientMessage) (*job, error) {
	j := &job{id: m.GetId(), session: x, message: m, begun: make(chan struct{})}
	j.ctx, j.stop = context.WithCancel(x.ctx)
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.ended {
		j.stop()
		return nil, ErrClosing
	}
	if limit := x.server.cfg.Limits.Jobs; len(x.jobs) >= limit {
		j.stop()
		return nil, faultf(proto.Code_CODE_LIMIT, "job", "%d jobs of this session run, at most %d", len(x.jobs), limit)
	}
	x.jobs[j.id] = j
	return j, nil
}

// claim reports whether the caller is the first. Then run or neverRun must follow.
func (j *job) claim() bool { return j.claimed.CompareAndSwap(false, true) }

// run notes the job's fence.
func (j *job) run(f fence) {
	j.handle = f
	close(j.begun)
	if n := j.consumed.Load(); n > 0 {
		f.Advance(int(n))
	}
	if j.cancelled.Load() { // cancelled while it was being started
		f.Cancel()
	}
}

// advance tells a layer-wise load how far its consumer has come, also before it has begun.
func (j *job) advance(layers uint32) {
	for have := j.consumed.Load(); have < layers && !j.consumed.CompareAndSwap(have, layers); have = j.consumed.Load() {
	}
	select {
	case <-j.begun:
		if j.handle != nil {
			j.handle.Advance(int(j.consumed.Load()))
		}
	default: // run will do it
	}
}

// neverRun says that no copy was or will be started. What the job still has to write to the client's semaphores comes before: who
// waits for the job may unmap them next.
func (j *job) neverRun() { close(j.begun) }

// cancel asks for the end. It does not wait. A job that nobody has claimed is over with it, whatever the store is doing.
func (j *job) cancel() {
	j.cancelled.Store(true)
	if j.claim() {
		j.abandon()
		j.neverRun()
		return
	}
	j.stop()
	select {
	case <-j.begun:
		if j.handle != nil {
			j.handle.Cancel()
		}
	default: // run will do it
	}
}

// waitFenced returns when no copy of the job can touch its blocks.
func (j *job) waitFenced() {
	<-j.begun
	if j.handle != nil {
		<-j.handle.Fenced()
	}
}

// abandon completes a job that was cancelled before anything of it ran: all its chunks were.
func (j *job) abandon() {
	switch {
	case j.session.ctx.Err() != nil: // nobody reads it
		j.finish()
	case j.message.GetLoad() != nil:
		s := &loading{job: j, chunks: j.message.GetLoad().GetChunks()}
		if j.session.engine != nil {
			_ = s.order(j.message.GetLoad()) // one that is wrong is of no use to anybody
		}
		s.failed(transfer.ErrCancelled)
	default:
		s := newStoring(j, len(j.message.GetStore().GetChunks()))
		s.timeline, _ = j.session.timelineOf(j.message.GetStore().GetTimeline(), 0)
		for i := range s.results {
			s.refused(i, transfer.ErrCancelled)
		}
		s.read(transfer.Outcome{})
		s.published(transfer.Outcome{})
	}
}

// fenced says whether no copy of the job can touch its blocks, as waitFenced without waiting.
func (j *job) fenced() bool {
	select {
	case <-j.begun:
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

// finish takes a completed job off the table.
func (j *job) finish() {
	j.stop()
	x := j.session
	x.mu.Lock()
	delete(x.jobs, j.id)
	x.mu.Unlock()
}

// cancelJob is CANCEL.
func (x *session) cancelJob(id uint64, m *proto.Cancel) error {
	if m.GetJob() == 0 || m.GetJob() >= id {
		return faultf(proto.Code_CODE_UNKNOWN, "job", "%d was never sent", m.GetJob())
	}
	x.mu.Lock()
	j := x.jobs[m.GetJob()]
	x.mu.Unlock()
	if j == nil {
		x.done(id)
		return nil
	}
	j.cancel()
	return x.acknowledge(id, []*job{j})
}

// advance is ADVANCE.
func (x *session) advance(id uint64, m *proto.Advance) error {
	if m.GetJob() == 0 || m.GetJob() >= id {
		return faultf(proto.Code_CODE_UNKNOWN, "job", "%d was never sent", m.GetJob())
	}
	x.mu.Lock()
	j := x.jobs[m.GetJob()]
	x.mu.Unlock()
	if j != nil {
		j.advance(m.GetLayers())
	}
	x.done(id)
	return nil
}

// flush is FLUSH.
func (x *session) flush(id uint64, m *proto.Flush) error {
	if limit := x.server.cfg.Limits.Jobs; len(m.GetJobs()) > limit {
		return faultf(proto.Code_CODE_LIMIT, "jobs", "%d, a session has at most %d", len(m.GetJobs()), limit)
	}
	var jobs []*job
	x.mu.Lock()
	for _, j := range x.jobs {
		if len(m.GetJobs()) == 0 {
			jobs = append(jobs, j)
		}
	}
	for i, n := range m.GetJobs() {
		if n == 0 || n >= id {
			x.mu.Unlock()
			return faultf(proto.Code_CODE_UNKNOWN, at("jobs", i, ""), "%d was never sent", n)
		}
		if j := x.jobs[n]; j != nil {
			jobs = append(jobs, j)
		}
	}
	x.mu.Unlock()
	return x.acknowledge(id, jobs)
}

// acknowledge answers Done once the jobs are fenced: at once, or on a goroutine that waits for them. Only the reader
// calls it.
func (x *session) acknowledge(id uint64, jobs []*job) error {
	jobs = slices.DeleteFunc(jobs, (*job).fenced)
	if len(jobs) == 0 {
		x.done(id)
		return nil
	}
	if limit := x.server.cfg.Limits.Jobs; x.unacknowledged.Load() >= int64(limit) {
		return faultf(proto.Code_CODE_LIMIT, "", "%d messages of this session wait for jobs to be fenced, that is the limit", limit)
	}
	x.unacknowledged.Add(1)
	if !x.wait(func() {
		for _, j := range jobs {
			j.waitFenced()
		}
		x.unacknowledged.Add(-1)
		x.done(id)
	}) {
		return ErrClosing
	}
	return nil
}

// jobsOf lists a registration's jobs. The caller holds the turn, so none begins meanwhile.
func (x *session) jobsOf(r *registration) []*job {
	x.mu.Lock()
	defer x.mu.Unlock()
	var jobs []*job
	for _, j := range x.jobs {
		if j.reg == r {
			jobs = append(jobs, j)
		}
	}
	return jobs
}

// unregister is UNREGISTER. The last part, when the jobs are fenced, takes the turn again.
func (x *session) unregister(id uint64, m *proto.Unregister) error {
	r := x.regs[m.GetGroup()]
	switch {
	case r == nil:
		return faultf(proto.Code_CODE_UNKNOWN, "group", "%d is not registered", m.GetGroup())
	case r.closing:
		return faultf(proto.Code_CODE_BUSY, "group", "%d is being unregistered", m.GetGroup())
	}
	jobs := x.jobsOf(r)
	if len(jobs) == 0 {
		x.forget(id, r)
		return nil
	}
	r.closing = true
	if !x.wait(func() {
		for _, j := range jobs {
			j.waitFenced()
		}
		x.turn.Lock()
		defer x.turn.Unlock()
		x.forget(id, r)
	}) {
		return ErrClosing
	}
	return nil
}

func (x *session) forget(id uint64, r *registration) {
	delete(x.regs, r.group.ID)
	x.unmapRegistration(r)
	x.done(id)
}
