package staging

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"
)

// Kind is the direction of a task: read or write.
type Kind uint8

const (
	Read  Kind = 0
	Write Kind = 1
)

func (k Kind) String() string {
	if k == Read {
		return "read"
	}
	return "write"
}

// Workers runs tasks on n goroutines. Reads and writes have separate queues. While both wait, reads get readRatio of
// the turns (0.75: three reads, one write). With 0 or 1, one kind runs only while the other has no tasks.
//
// Tasks may be in lanes, one for each resource that can hang, such as a mount. With several lanes, each gets at most
// three quarters of the goroutines, so that a hanging lane does not stop the others.
//
// Tenants take turns in each lane. While others have tasks, a tenant has at most half of the goroutines, and in one
// lane at most half of the processors unless its tasks there are slow, as on a network.
//
// The queues have no bound, and SubmitTo never blocks. Callers bound them by a resource that a task needs before it is
// submitted: a slot or a credit.
type Workers struct {
	ratio float64

	mu      sync.Mutex
	wake    sync.Cond
	lanes   []*lane // in the order of their turns: the lane that started a task last is the last
	most    int     // most running tasks of one lane
	beside  int     // most running tasks of a lane and tenant while other tenants have tasks, unless they are slow
	queued  [2]int
	credit  float64
	closed  bool
	started []time.Time // start of each worker's task; zero while it has none
	done    [2]uint64
	panics  uint64
	onPanic func(value any, stack []byte)

	over chan struct{} // closed when the last goroutine has ended
	left int
}

// WorkersStats are the pool's figures.
type WorkersStats struct {
	Workers             int
	Running             int
	Longest             time.Duration // age of the oldest running task
	QueuedRead          int
	QueuedWrite         int
	DoneRead, DoneWrite uint64
	Panics              uint64      // tasks that panicked
	Lanes               []LaneStats // lanes that had tasks, by name
}

// LaneStats is the number of waiting and running tasks of one lane.
type LaneStats struct {
	Name                    string
	QueuedRead, QueuedWrite int
	Running                 int
}

// NewWorkers starts n goroutines (at least one).
func NewWorkers(n int, readRatio float64) *Workers {
	n = max(1, n)
	w := &Workers{ratio: min(1, max(0, readRatio)), most: n, beside: max(1, runtime.GOMAXPROCS(0)/2),
		started: make([]time.Time, n), left: n, over: make(chan struct{})}
	w.wake.L = &w.mu
	for i := range n {
		go w.work(i)
	}
	return w
}

// lane is a group of tasks of one tenant that can hang together.
type lane struct {
	name    string
	tenant  uint32
	queue   [2]ring
	running int
	last    time.Time // start of the task that ended last
	slow    float64   // share of slow tasks among the latest
}

// A slow task takes longer than this: it waits most of the time, as for a network, and computes for a tenth of it.
const (
	slowTask = 2 * time.Millisecond
	slowByte = 4 * time.Nanosecond
)

// waits reports whether most tasks are slow: they leave the processors to other tasks.
func (l *lane) waits() bool { return l.slow > 0.75 }

// mostLanes is the number of lanes without tasks that are kept.
const mostLanes = 64

// Lanes sets the number of lanes. It must be called before SubmitTo.
func (w *Workers) Lanes(n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.most = len(w.started); n > 1 {
		w.most = max(1, w.most-max(1, w.most/4))
	}
}

// OnPanic sets a function that is called when a task panics, and keeps the process alive. It must be called before
// SubmitTo. The worker continues.
func (w *Workers) OnPanic(told func(value any, stack []byte)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.onPanic = told
}

// SubmitTo queues a task of a tenant in a lane. bytes is the number of bytes that it moves. It fails with [ErrClosed]
// after Close and never blocks.
func (w *Workers) SubmitTo(name string, tenant uint32, kind Kind, bytes int64, task func()) error {
	if kind > Write {
		return fmt.Errorf("staging: task of unknown kind %d", kind)
	}
	w.mu.Lock()
	if w.closed {
		w.mu.Unlock()
		return ErrClosed
	}
	w.lane(name, tenant).queue[kind].push(queued{task, bytes})
	w.queued[kind]++
	w.mu.Unlock()
	w.wake.Signal()
	return nil
}

// lane returns a lane, which it makes if missing.
func (w *Workers) lane(name string, tenant uint32) *lane {
	for _, l := range w.lanes {
		if l.name == name && l.tenant == tenant {
			return l
		}
	}
	if len(w.lanes) >= mostLanes {
		w.lanes = slices.DeleteFunc(w.lanes, func(l *lane) bool { return l.running+l.queue[Read].len+l.queue[Write].len == 0 })
	}
	l := &lane{name: name, tenant: tenant}
	w.lanes = append(w.lanes, l)
	return l
}

// Close accepts no more tasks, runs those in the queues, and returns when all have ended: each task that SubmitTo
// accepted runs once. A second call waits too.
func (w *Workers) Close() {
	w.mu.Lock()
	w.closed = true
	w.mu.Unlock()
	w.wake.Broadcast()
	<-w.over
}

// Stats returns a snapshot.
func (w *Workers) Stats() WorkersStats {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := WorkersStats{
		Workers:    len(w.started),
		QueuedRead: w.queued[Read], QueuedWrite: w.queued[Write],
		DoneRead: w.done[Read], DoneWrite: w.done[Write],
		Panics: w.panics,
	}
	for _, t := range w.started {
		if !t.IsZero() {
			s.Running++
			s.Longest = max(s.Longest, time.Since(t))
		}
	}
	for _, l := range w.lanes {
		i := slices.IndexFunc(s.Lanes, func(o LaneStats) bool { return o.Name == l.name })
		if i < 0 {
			i, s.Lanes = len(s.Lanes), append(s.Lanes, LaneStats{Name: l.name})
		}
		o := &s.Lanes[i]
		o.QueuedRead, o.QueuedWrite, o.Running = o.QueuedRead+l.queue[Read].len, o.QueuedWrite+l.queue[Write].len, o.Running+l.running
	}
	slices.SortFunc(s.Lanes, func(a, b LaneStats) int { return strings.Compare(a.Name, b.Name) })
	return s
}

// work is the loop of worker i.
func (w *Workers) work(i int) {
	w.mu.Lock()
	for {
		var l *lane
		var kind Kind
		for {
			if l, kind = w.turn(); l != nil || w.closed && w.queued == [2]int{} {
				break
			}
			w.wake.Wait()
		}
		if l == nil {
			break
		}
		task := l.queue[kind].pop()
		w.queued[kind]--
		l.running++
		w.started[i] = time.Now()
		w.mu.Unlock()
		w.run(i, l, kind, task)
		w.mu.Lock()
	}
	w.left--
	if w.left == 0 {
		close(w.over)
	}
	w.mu.Unlock()
}

// run runs one task and counts it, however it ends.
func (w *Workers) run(i int, l *lane, kind Kind, task queued) {
	returned := false
	defer func() {
		var value any
		if !returned {
			value = recover()
		}
		w.mu.Lock()
		w.done[kind]++
		if l.slow *= 7. / 8; time.Since(w.started[i]) > slowTask+time.Duration(task.bytes)*slowByte {
			l.slow += 1. / 8
		}
		w.started[i], l.last = time.Time{}, w.started[i]
		if l.running--; w.closed {
			w.wake.Broadcast()
		} else if w.queued != [2]int{} { // a task may have waited for this end
			w.wake.Signal()
		}
		told := w.onPanic
		if value != nil {
			w.panics++
		}
		w.mu.Unlock()
		switch {
		case returned:
		case value == nil: // runtime.Goexit: this goroutine ends here, and another replaces it
			go w.work(i)
		case told == nil:
			panic(value)
		default:
			told(value, debug.Stack())
		}
	}()
	task.run()
	returned = true
}

// turn is the next task, or nil when none can run. With both kinds waiting, reads get ratio of the turns, evenly
// spread, and lanes take turns.
func (w *Workers) turn() (*lane, Kind) {
	var next [2]int
	for kind := range next {
		next[kind] = -1
		for i, l := range w.lanes {
			if l.queue[kind].len > 0 && w.may(l) {
				next[kind] = i
				break
			}
		}
	}
	kind := Write
	switch {
	case next[Read] < 0 && next[Write] < 0:
		return nil, 0
	case next[Write] < 0:
		kind = Read
	case next[Read] >= 0:
		if w.credit += w.ratio; w.credit >= 1 {
			w.credit--
			kind = Read
		}
	}
	i := next[kind]
	l := w.lanes[i]
	copy(w.lanes[i:], w.lanes[i+1:])
	w.lanes[len(w.lanes)-1] = l
	return l, kind
}

// may reports whether a task of the lane may run next to the running ones.
func (w *Workers) may(l *lane) bool {
	lane, tenant, alone := 0, 0, true
	for _, o := range w.lanes {
		if o.name == l.name {
			lane += o.running
		}
		if o.tenant == l.tenant {
			tenant += o.running
		} else if alone {
			alone = o.running+o.queue[Read].len+o.queue[Write].len == 0 && time.Since(o.last) > time.Second
		}
	}
	return lane < w.most && (alone || tenant < max(1, len(w.started)/2) && l.running < max(1, w.most/2) &&
		(l.running < w.beside || l.waits()))
}

// queued is a task in a queue.
type queued struct {
	run   func()
	bytes int64
}

// ring is a queue that grows and never shrinks.
type ring struct {
	buf  []queued // a power of two long
	head int
	len  int
}

func (r *ring) push(f queued) {
	if r.len == len(r.buf) {
		buf := make([]queued, max(64, 2*len(r.buf)))
		n := copy(buf, r.buf[r.head:])
		copy(buf[n:], r.buf[:r.head])
		r.buf, r.head = buf, 0
	}
	r.buf[(r.head+r.len)&(len(r.buf)-1)] = f
	r.len++
}

func (r *ring) pop() queued {
	f := r.buf[r.head]
	r.buf[r.head] = queued{}
	r.head = (r.head + 1) & (len(r.buf) - 1)
	r.len--
	return f
}
