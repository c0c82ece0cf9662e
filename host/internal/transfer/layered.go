package transfer

import (
	"cmp"
	"slices"
	"sync"

	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// layered is a layer-wise load. A step is a few layers, the first layer always alone, and a task loads one step of one
// piece. A worker runs several tasks at once where their bytes are too few for a launch each. Tasks are queued step by
// step: step i is queued when step i-width has landed. Enough tasks are then queued to keep every worker busy, and few
// enough that another load's first layer does not wait for all of this load.
type layered struct {
	queue *Queue
	fence *fence
	spec  *LoadJob
	order []uint32
	parts []run // each step's layers, as a range of the order
	width int   // steps that may be in flight

	mu         sync.Mutex
	taken      int  // tasks started, in the order of the queue
	begun      int  // steps queued
	landed     int  // steps reported
	begins     bool // Begin was called
	submitting bool
	reporting  bool
	steps      []layerStep // one for each of parts
	chunks     []layerChunk
	runs       map[*kv.Plan][][]run
	lane       string // the root of the first chunk, where most of a prefix is: the workers' lane of all tasks
}

type layerStep struct {
	left     int // tasks that have not ended
	together int // tasks that a worker runs at once
	failed   []int
}

type layerChunk struct {
	opening sync.Mutex // held while the file is opened or closed, and while the head is read
	piece   *store.Piece
	span    span
	head    *store.Head
	source  source // the piece, as its route opened it; nil before
	failed  error  // the error of opening the piece; nil if there was none
	users   int    // tasks that are reading the piece
	open    bool   // the piece's file is open
	kept    bool   // the file stays open until the last step

	// layered.mu guards these.
	left int // tasks that have not ended
	err  error
}

// loadLayers makes a layer-wise load without starting it.
func (q *Queue) loadLayers(j *fence, spec *LoadJob) *layered {
	l := &layered{queue: q, fence: j, spec: spec, order: LayersOf(spec.Memory.Geometry()), runs: map[*kv.Plan][][]run{}}
	n := len(spec.Chunks)
	if n == 0 {
		return l
	}
	l.width = max(2, (2*q.engine.cfg.Threads+n-1)/n)
	l.parts = partsOf(spec.Memory.Geometry(), l.order, min(q.engine.cfg.SlotBytes, gpuCopyBytes))
	l.steps, l.chunks = make([]layerStep, len(l.parts)), make([]layerChunk, n)
	for i := range l.steps {
		l.steps[i].left, l.steps[i].together = n, l.together(l.parts[i])
	}
	for i := range l.chunks { // a chunk with bad block ids fails before its first step
		l.chunks[i].left, l.chunks[i].err = len(l.steps), CheckBlocks(spec.Memory, spec.Chunks[i].Blocks, true)
	}
	return l
}

// together returns how many tasks of a step a worker runs at once: as many as one launch has bytes for, if every worker
// still has two.
func (l *layered) together(part run) int {
	if _, ok := l.spec.Memory.(*DeviceMemory); !ok {
		return 1
	}
	g, bytes := l.spec.Memory.Geometry(), 1
	for _, p := range g.Planes {
		if slices.Contains(l.order[part.lo:part.hi], p.Layer) {
			bytes += int(g.Blocks) * int(p.PageBytes)
		}
	}
	return max(1, min(min(l.queue.engine.cfg.SlotBytes, gpuCopyBytes)/bytes, len(l.spec.Chunks)/(2*l.queue.engine.cfg.Threads)))
}

// begin queues the first steps.
func (l *layered) begin() {
	for i := range l.spec.Chunks {
		l.spec.Lease.Approach(l.spec.Chunks[i].Index)
	}
	if len(l.chunks) > 0 {
		l.lane = l.spec.Lease.Root(l.spec.Chunks[0].Index)
	}
	l.mu.Lock()
	l.begins = true
	l.mu.Unlock()
	l.submitDue()
}

// due reports whether another step may start. After a cancel every step may, since its tasks notice the cancel and end.
// The caller holds mu.
func (l *layered) due() bool {
	switch {
	case !l.begins || l.begun == len(l.steps):
		return false
	case l.fence.isShut(), l.queue.engine.ctx.Err() != nil:
		return true
	}
	return l.begun < l.landed+l.width
}

// submitDue queues the steps that are due.
func (l *layered) submitDue() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.submitting { // the goroutine that is submitting will look again
		return
	}
	l.submitting = true
	g := l.spec.Memory.Geometry()
	for l.due() {
		n := l.steps[l.begun].together
		l.begun++
		l.mu.Unlock()
		for range (len(l.chunks) + n - 1) / n {
			if l.queue.workers.SubmitTo(l.lane, l.spec.Tenant, staging.Read, int64(n)*g.PageBytes()/int64(len(l.steps)), l.run) != nil {
				l.run() // the engine is closed; the task notices and ends
			}
		}
		l.mu.Lock()
	}
	l.submitting = false
}

// layerTask loads one step of one chunk.
type layerTask struct {
	*layered
	step, index int
	chunk       *layerChunk
	loading     loading
	waits       bool // for the copies that the bundle makes
}

// partOf implements [parted].
func (t *layerTask) partOf(p *kv.Plan) []run { return t.runsOf(p)[t.step] }

// run runs the next tasks: tasks start in the order in which they were queued.
func (l *layered) run() {
	l.mu.Lock()
	step, first := l.taken/len(l.chunks), l.taken%len(l.chunks)
	n := min(l.steps[step].together, len(l.chunks)-first)
	l.taken += n
	l.mu.Unlock()
	if n == 1 {
		l.runTask(&layerTask{layered: l, step: step, index: first, chunk: &l.chunks[first]}, nil)
		return
	}
	b := &bundle{memory: l.spec.Memory.(*DeviceMemory), fence: l.fence, engine: l.queue.engine}
	tasks := make([]layerTask, n)
	for i := range tasks {
		tasks[i] = layerTask{layered: l, step: step, index: first + i, chunk: &l.chunks[first+i]}
	}
	begun, err := 0, errPanicked // until all copies were made
	defer func() {
		for i := range tasks {
			if t := &tasks[i]; i >= begun || t.waits {
				t.over(cmp.Or(t.loading.late, err))
			}
		}
	}()
	for begun < n {
		begun++
		l.runTask(&tasks[begun-1], b)
	}
	b.flush()
	err = nil
}

func (l *layered) runTask(t *layerTask, b *bundle) {
	l.mu.Lock()
	err := t.chunk.err
	l.mu.Unlock()
	t.loading = loading{parts: t, pieceReader: newReader(l.queue, l.fence, l.spec, t.index)}
	t.loading.bundle = b
	if err != nil { // the chunk failed in an earlier step, or its blocks were bad
		t.end(err)
		return
	}
	l.queue.engine.runLoad(l.spec, t)
}

// read loads the step's bytes of the chunk, and returns the copy of the last of them as a function.
func (t *layerTask) read() (last func() error, err error) {
	switch { // no read is needed
	case t.fence.isShut():
		return nil, ErrCancelled
	case t.queue.engine.ctx.Err() != nil:
		return nil, ErrClosed
	}
	if err := t.open(); err != nil {
		return nil, err
	}
	return t.loading.deliver()
}

// open opens the piece, unless another step has opened it.
func (t *layerTask) open() (err error) {
	c, l := t.chunk, &t.loading
	c.opening.Lock()
	defer c.opening.Unlock()
	if c.failed != nil {
		return c.failed
	}
	defer func() { c.failed = err }()
	if c.piece == nil {
		if c.piece, err = t.spec.open(t.index); err != nil {
			return err
		}
		c.open = true
		c.span = t.queue.startSpan(c.piece.Root(), staging.Read, t.spec.Paths)
		l.piece, l.span = c.piece, &c.span
		err = l.open()
		c.head, c.source = l.head, l.source
	} else if !c.open {
		if err = c.piece.Resume(); err != nil {
			return err
		}
		c.open = true
	}
	c.users++
	l.piece, l.head, l.source = c.piece, c.head, c.source
	return err
}

// rest closes the file of a chunk that no task reads, unless the session may keep it open until the next step.
func (t *layerTask) rest() {
	c := t.chunk
	c.opening.Lock()
	defer c.opening.Unlock()
	if c.users--; c.users > 0 || c.kept || t.spec.Files == nil || c.piece.File().Fd() == staging.NoFd {
		return
	}
	if c.kept = t.spec.Files.Keep(); !c.kept {
		c.piece.Pause()
		c.open = false
	}
}

// end ends a task, unless its bundle has copies of it to make.
func (t *layerTask) end(err error) {
	if t.loading.bundled {
		t.waits, t.loading.late = true, cmp.Or(t.loading.late, err)
		return
	}
	t.over(err)
}

// over records the task's result, reports the layers that it completed, and submits the steps that are now due.
func (t *layerTask) over(err error) {
	t.queue.engine.release(t.loading.held, err)
	l, c := t.layered, t.chunk
	l.mu.Lock()
	s := &l.steps[t.step]
	if err != nil {
		s.failed = append(s.failed, t.index)
		if c.err == nil {
			c.err = err
		}
	}
	s.left--
	l.report()
	l.mu.Unlock()
	if t.loading.piece != nil {
		t.rest()
	}
	l.submitDue()
	// Last, so that all layers are reported before the job ends.
	l.mu.Lock()
	c.left--
	over, err := c.left == 0, c.err
	l.mu.Unlock()
	if over {
		l.endChunk(t.index, err)
	}
}

func (l *layered) endChunk(i int, err error) {
	c := &l.chunks[i]
	l.queue.engine.closePiece(&c.span, c.piece, err) // here: the step that ended first may not have been the one that opened it
	if c.kept {
		l.spec.Files.Gone()
	}
	l.fence.endLoad(i, l.spec.Memory, err)
}

// report reports landed layers in order. The caller holds mu, which is released during the callbacks.
func (l *layered) report() {
	for !l.reporting && l.landed < len(l.steps) && l.steps[l.landed].left == 0 {
		l.reporting = true
		at := l.landed
		if at > 0 { // a failed chunk stays failed, even if a later step of it succeeded
			l.steps[at].failed = append(l.steps[at].failed, l.steps[at-1].failed...)
		}
		slices.Sort(l.steps[at].failed)
		l.steps[at].failed = slices.Compact(l.steps[at].failed)
		failed := l.steps[at].failed
		l.mu.Unlock()
		l.notify(at, failed)
		l.mu.Lock()
		l.reporting = false
		l.landed++
	}
}

// notify reports a step's layers, unless the fence is closed. It cannot close until then.
func (l *layered) notify(step int, failed []int) {
	if l.spec.Layers.Landed == nil || !l.fence.enter() {
		return
	}
	defer l.fence.leave()
	for _, layer := range l.order[l.parts[step].lo:l.parts[step].hi] {
		l.spec.Layers.Landed(layer, failed)
	}
}

// runsOf returns the runs of extents of each step under a plan.
func (l *layered) runsOf(p *kv.Plan) [][]run {
	l.mu.Lock()
	defer l.mu.Unlock()
	runs := l.runs[p]
	if runs == nil {
		runs = runsOf(p, l.order, l.parts)
		l.runs[p] = runs
	}
	return runs
}
