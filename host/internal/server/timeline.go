package server

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/kvhost/kvhost/host/internal/proto"
)

// timelines starts and completes a session's jobs according to the client's semaphores.
type timelines struct {
	ctx    context.Context // context of the session
	log    *slog.Logger
	memory *clientMemory
	jobs   *jobTable
	limit  time.Duration // longest wait of a job

	mu      sync.Mutex
	shared  *sharedSemaphores // nil before SEMAPHORES
	held    []heldJob
	polling bool // a goroutine is polling the semaphores of held
}

// heldJob is a job that starts when its semaphore reaches a value.
type heldJob struct {
	job      *job
	timeline *timeline
	since    time.Time
	over     func() // called when the job no longer waits
}

func (s *timelines) share(m *proto.Semaphores) error {
	if s.semaphores() != nil {
		return faultf(proto.Code_CODE_BUSY, "semaphores", "the session has shared semaphores already")
	}
	shared, err := s.memory.mapSemaphores(m)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.shared = shared
	return nil
}

func (s *timelines) semaphores() *sharedSemaphores {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.shared
}

// of reads the timeline of a job. layers is 0 unless the job is a layer-wise load.
func (s *timelines) of(m *proto.Timeline, layers int) (*timeline, error) {
	if m == nil {
		return nil, nil
	}
	shared := s.semaphores()
	if shared == nil {
		return nil, faultf(proto.Code_CODE_UNKNOWN, "timeline", "the session has shared no semaphores")
	}
	t := &timeline{
		log: s.log, semaphores: shared, done: int(m.GetDone()), doneValue: m.GetDoneValue(), status: -1, layers: layers,
	}
	if m.Wait != nil {
		t.wait, t.waitValue = int(m.GetWait()), m.GetWaitValue()
	}
	switch {
	case t.wait >= shared.count:
		return nil, invalid("timeline.wait", "%d of %d", t.wait, shared.count)
	case t.done >= shared.count:
		return nil, invalid("timeline.done", "%d of %d", t.done, shared.count)
	case t.doneValue <= uint64(layers):
		return nil, invalid("timeline.done_value", "%d, want more than the %d layers", t.doneValue, layers)
	}
	if m.Status != nil {
		if t.status = int(m.GetStatus()); t.status > shared.count-max(1, layers) {
			return nil, invalid("timeline.status", "%d semaphores from %d, of %d", max(1, layers), t.status,
				shared.count)
		}
	}
	return t, nil
}

// start starts a job that was submitted held: now if its semaphore has the value, or later. over is called when the job starts,
// and also when it is ended because it has waited too long.
func (s *timelines) start(j *job, t *timeline, over func()) {
	if !t.holds() {
		return
	}
	h := heldJob{j, t, time.Now(), over}
	if h.settled(s.limit) {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.polling && !s.jobs.wait(s.poll) {
		return // the session is ending and cancels the job
	}
	s.polling = true
	s.held = append(s.held, h)
}

// settled starts the job if its semaphore has the value, and ends it if it has waited longer than limit. It reports whether the
// job needs no further polling.
func (h heldJob) settled(limit time.Duration) bool {
	select {
	case <-h.job.handle.Fenced(): // cancelled
		h.over()
		return true
	default:
	}
	reached, err := h.timeline.reached()
	switch {
	case err == nil && !reached && time.Since(h.since) > limit:
		h.timeline.log.Warn("job ended: its client's semaphore does not come", "job", h.job.id, "limit", limit)
		h.job.expire()
		h.over()
		return true
	case err != nil:
		h.timeline.log.Error("cannot read a client's semaphore, its job is cancelled", "job", h.job.id, "error", err)
		h.job.cancel()
		return true
	case reached:
		h.job.handle.Begin()
		h.over()
	}
	return reached
}

// Polling intervals. The interval is shortest after a semaphore has changed and grows from then on.
const (
	shortestPoll = 50 * time.Microsecond
	longestPoll  = time.Millisecond
)

// poll polls the semaphores of held jobs until there are none.
func (s *timelines) poll() {
	pause := time.NewTimer(shortestPoll)
	defer pause.Stop()
	wait := shortestPoll
	for {
		s.mu.Lock()
		list := s.held
		s.held = nil
		if len(list) == 0 {
			s.polling = false
			s.mu.Unlock()
			return
		}
		s.mu.Unlock()
		rest := list[:0]
		for _, h := range list {
			if h.settled(s.limit) {
				wait = shortestPoll
			} else {
				rest = append(rest, h)
			}
		}
		s.mu.Lock()
		s.held = append(rest, s.held...)
		s.mu.Unlock()
		pause.Reset(wait)
		select {
		case <-s.ctx.Done():
			return
		case <-pause.C:
		}
		wait = min(wait+wait/8, longestPoll)
	}
}

// timeline is the part of a job in the semaphores: the one it waits for, and those it writes. A nil timeline does nothing.
type timeline struct {
	log        *slog.Logger
	semaphores *sharedSemaphores
	wait       int
	waitValue  uint64 // 0 if the job does not wait
	done       int
	doneValue  uint64
	status     int // index of the first status semaphore; -1 if there is none
	layers     int // number of layers of a layer-wise load; 0 for other jobs
	landed     int // number of layers reported so far
}

// Values of a status semaphore.
const (
	statusDone   = 1
	statusFailed = 2
)

// holds reports whether the job must be submitted held.
func (t *timeline) holds() bool { return t != nil && t.waitValue > 0 }

// reached reports whether the semaphore that the job waits for has its value.
func (t *timeline) reached() (bool, error) {
	v, err := t.semaphores.Load(t.wait)
	return v >= t.waitValue, err
}

// write sets a semaphore. A failure is only logged: the memory of a lost GPU takes no writes, and its client notices the loss
// itself.
func (t *timeline) write(i int, v uint64) {
	if err := t.semaphores.Store(i, v); err != nil {
		t.log.Error("cannot write a client's semaphore", "semaphore", i, "error", err)
	}
}

// layer reports that the next layer has arrived. failed is true if any chunk of the layer has failed.
func (t *timeline) layer(failed bool) {
	if t == nil {
		return
	}
	t.writeStatus(failed)
	t.write(t.done, t.doneValue-uint64(t.layers-t.landed))
	t.landed++
}

func (t *timeline) writeStatus(failed bool) {
	if t.status < 0 {
		return
	}
	v := uint64(statusDone)
	if failed {
		v = statusFailed
	}
	t.write(t.status+t.landed, v)
}

// over reports that no copy of the job can touch its blocks any more. Layers that were not reported count as failed.
func (t *timeline) over(failed bool) {
	if t == nil {
		return
	}
	if t.layers == 0 {
		t.writeStatus(failed)
	}
	for ; t.landed < t.layers; t.landed++ {
		t.writeStatus(true)
	}
	t.write(t.done, t.doneValue)
}
