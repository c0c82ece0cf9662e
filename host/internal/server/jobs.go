package server

import (
	"slices"
	"sync"
	"sync/atomic"

	"github.com/kvhost/kvhost/host/internal/proto"
)

// jobTable holds the jobs of a session and counts the goroutines that its end waits for.
type jobTable struct {
	limit int

	mu      sync.Mutex
	ended   bool // set by end: no further job or goroutine is accepted
	jobs    map[uint64]*job
	waiters sync.WaitGroup // incremented under mu, only while ended is false

	unacknowledged atomic.Int64 // CANCEL and AWAIT_COPIES messages that a goroutine will answer
}

// add enters a job, so that CANCEL, AWAIT_COPIES and the session's end find it.
func (t *jobTable) add(j *job) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.ended {
		return ErrClosing
	}
	if len(t.jobs) >= t.limit {
		return faultf(proto.Code_CODE_LIMIT, "job", "%d jobs of this session run, at most %d", len(t.jobs), t.limit)
	}
	t.jobs[j.id] = j
	return nil
}

// get returns a job, or nil if it has completed.
func (t *jobTable) get(id uint64) *job {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.jobs[id]
}

func (t *jobTable) len() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.jobs)
}

func (t *jobTable) remove(id uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.jobs, id)
}

// list returns the jobs for which keep is true.
func (t *jobTable) list(keep func(*job) bool) (list []*job) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, j := range t.jobs {
		if keep(j) {
			list = append(list, j)
		}
	}
	return list
}

// end refuses further jobs and goroutines, and returns the remaining jobs.
func (t *jobTable) end() []*job {
	t.mu.Lock()
	t.ended = true
	t.mu.Unlock()
	return t.list(func(*job) bool { return true })
}

// hold makes the session's end wait until waiters.Done is called. It returns false if the end has begun.
func (t *jobTable) hold() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.ended {
		return false
	}
	t.waiters.Add(1)
	return true
}

// wait runs fn on a goroutine that the session's end waits for. It returns false, without running fn, if the end has begun.
func (t *jobTable) wait(fn func()) bool {
	held := t.hold()
	if held {
		go func() {
			defer t.waiters.Done()
			fn()
		}()
	}
	return held
}

// named returns the jobs that an AWAIT_COPIES names, or all jobs if it names none. Jobs that have completed are left out.
func (t *jobTable) named(id uint64, m *proto.AwaitCopies) ([]*job, error) {
	names := m.GetJobs()
	if len(names) > t.limit {
		return nil, faultf(proto.Code_CODE_LIMIT, "jobs", "%d, a session has at most %d", len(names), t.limit)
	}
	if len(names) == 0 {
		return t.list(func(*job) bool { return true }), nil
	}
	var jobs []*job
	for i, n := range names {
		if n == 0 || n >= id {
			return nil, faultf(proto.Code_CODE_UNKNOWN, at("jobs", i, ""), "%d was never sent", n)
		}
		if j := t.get(n); j != nil {
			jobs = append(jobs, j)
		}
	}
	return jobs, nil
}

// acknowledge calls done when all jobs are fenced. It does so at once if they are, and otherwise on a goroutine that waits.
// Only the session's reader calls it.
func (t *jobTable) acknowledge(jobs []*job, done func()) error {
	jobs = slices.DeleteFunc(jobs, (*job).fenced)
	if len(jobs) == 0 {
		done()
		return nil
	}
	if t.unacknowledged.Load() >= int64(t.limit) {
		return faultf(proto.Code_CODE_LIMIT, "", "%d messages of this session wait for fences, that is the limit",
			t.limit)
	}
	t.unacknowledged.Add(1)
	if !t.wait(func() {
		for _, j := range jobs {
			j.waitFenced()
		}
		t.unacknowledged.Add(-1)
		done()
	}) {
		return ErrClosing
	}
	return nil
}
