package transfer

import (
	"errors"
	"fmt"
	"time"

	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// StoreJob writes chunks with reserved places.
type StoreJob struct {
	Tenant uint32 // tenants take turns for workers
	Memory Memory
	Chunks []StoreChunk
	// Held keeps the store from starting before Handle.Begin is called.
	Held bool
	// Read runs once, when no task will read the pages any more: the client may reuse its blocks. Failed lists the
	// chunks that are known to have failed by then.
	Read func(Outcome)
	// Published runs once, after Read, when every chunk is published at the configured durability or has failed.
	Published func(Outcome)
	// Withdrawn reports whether the client has taken the store back, and may have used its blocks again since. It is
	// called inside the fence, each time after pages were read. Optional.
	Withdrawn func() (bool, error)
	// Paths collects the roots and routes of the pieces. Optional.
	Paths *Paths
}

// StoreChunk is one piece of a StoreJob. The job owns Put and always publishes or aborts it.
type StoreChunk struct {
	Put    *store.Put
	Unit   int      // unit of the memory
	Blocks []uint32 // the client's block ids, in the chunk's order
}

// Store queues a job. The job owns every Put, even if the engine is closed.
func (q *Queue) Store(s *StoreJob) *Handle {
	f := newFence(len(s.Chunks), s.Read, s.Published)
	spec := *s
	spec.Memory = f.flagged(s.Memory)
	if len(s.Chunks) == 0 {
		f.cancel()
	}
	begin := func() {
		giveUp := func(i int, err error) {
			spec.Chunks[i].Put.Abort(err)
			f.settle(i, err, 0)
			f.taskDone()
		}
		timeout := newQueueTimeout(len(spec.Chunks), q.engine.cfg.WriteQueue, func(i int) {
			q.engine.stats.storesShed.Add(1)
			giveUp(i, ErrShed)
		})
		g := spec.Memory.Geometry()
		for i := range spec.Chunks {
			t := &storeTask{queue: q, fence: f, memory: spec.Memory, chunk: &spec.Chunks[i], index: i, paths: spec.Paths,
				withdrawn: spec.Withdrawn}
			run := func() {
				if timeout.claim(i) {
					t.run()
				}
			}
			if q.workers.SubmitTo(t.chunk.Put.Root(), spec.Tenant, staging.Write, g.PageBytes(), run) != nil && timeout.claim(i) {
				giveUp(i, ErrClosed)
			}
		}
	}
	return newHandle(f, nil, s.Held, begin)
}

// storeTask stores one chunk of a job.
type storeTask struct {
	queue  *Queue
	fence  *fence
	memory Memory
	chunk  *StoreChunk
	index  int
	paths  *Paths
	span   span
	size   int64 // bytes of the file

	withdrawn func() (bool, error) // nil: the store cannot be withdrawn
}

func (t *storeTask) run() {
	put, e := t.chunk.Put, t.queue.engine
	err := errPanicked // until the task has run to its end
	t.span, t.size = t.queue.startSpan(put.Root(), staging.Write, t.paths), put.FileBytes()
	defer func() {
		t.span.finish(t.size, err)
		if err != nil {
			put.Abort(err)
			t.fence.settle(t.index, err, 0)
			t.fence.fail(t.index, err)
			e.stats.storeErrors.Add(1)
		} else {
			e.stats.stored(t.size)
		}
		t.fence.taskDone()
	}()
	if err = t.writeAndPublish(); err != nil && e.ctx.Err() != nil {
		err = fmt.Errorf("%w: %w", ErrClosed, err)
	}
}

// writeAndPublish fills the temporary by the first route that takes the put, and publishes it.
func (t *storeTask) writeAndPublish() error {
	put := t.chunk.Put
	if err := CheckBlocks(t.memory, t.chunk.Blocks, false); err != nil {
		return err
	}
	if !put.Plan().Geometry().Equal(t.memory.Geometry()) {
		return ErrGeometry
	}
	f, err := put.File()
	if err != nil {
		return err
	}
	for _, way := range t.queue.engine.routes {
		if err = way.store(t, f); !errors.Is(err, errNotHere) {
			break
		}
	}
	if err != nil {
		return err
	}
	return put.Publish(t.queue.engine.ctx)
}

type pieceWriter struct {
	task  *storeTask
	plan  *kv.Plan
	table []uint64
	file  staging.File
	buf   []byte
}

// whole writes the file's image with one call: no byte of the header reaches the file before the payload's does.
func (w *pieceWriter) whole() error {
	put := w.task.chunk.Put
	head := put.DataOffset()
	image := w.buf[:put.FileBytes()]
	extents := w.plan.Extents()
	if err := w.gather(0, len(extents), image[head:], 0); err != nil {
		return err
	}
	clear(image[head+w.plan.PayloadBytes():])
	put.Head(image[:head], w.table)
	_, err := w.file.WriteAt(image, 0)
	return err
}

// parts writes a payload that is larger than the buffer, one buffer at a time, each starting at a 4 KiB boundary of
// the file: the bytes beyond the last boundary move to the front of the buffer for the next write. Header and table
// go last.
func (w *pieceWriter) parts() error {
	put := w.task.chunk.Put
	head := put.DataOffset()
	extents := w.plan.Extents()
	base := int64(0) // payload offset of buf[0], always aligned
	for lo := 0; lo < len(extents); {
		hi := lo
		for hi < len(extents) && end(extents[hi])-base <= int64(len(w.buf)) {
			hi++
		}
		if err := w.gather(lo, hi, w.buf, base); err != nil {
			return err
		}
		filled := end(extents[hi-1]) - base
		n := filled &^ 4095
		if hi == len(extents) {
			n = (filled + 4095) &^ 4095
			clear(w.buf[filled:n])
		}
		if _, err := w.file.WriteAt(w.buf[:n], head+base); err != nil {
			return err
		}
		copy(w.buf, w.buf[n:max(n, filled)])
		base += n
		lo = hi
	}
	put.Head(w.buf[:head], w.table)
	_, err := w.file.WriteAt(w.buf[:head], 0)
	return err
}

// gather copies extents [lo, hi) from the pages, inside the fence, and zeroes the gaps before them.
func (w *pieceWriter) gather(lo, hi int, dst []byte, base int64) error {
	extents := w.plan.Extents()
	for x := lo; x < hi; x++ {
		var before int64
		if x > 0 {
			before = end(extents[x-1])
		}
		clear(dst[before-base : extents[x].Off-base])
	}
	return w.gatherTo(dst, lo, hi, base)
}

// gatherTo is gather, except that it does not zero the gaps.
func (w *pieceWriter) gatherTo(dst []byte, lo, hi int, base int64) error {
	_, err := w.fenced(lo, hi, base, func(r ExtentRange) (bool, error) {
		defer observe(&w.task.queue.engine.gathers, w.task.memory, r.extents(), time.Now())
		return true, w.task.memory.Gather(r, dst)
	})
	return err
}

// fenced calls read inside the fence, which reads the pages of extents [lo, hi). When read reports the last pages, the
// chunk is settled.
func (w *pieceWriter) fenced(lo, hi int, base int64, read func(ExtentRange) (done bool, err error)) (done bool, err error) {
	t := w.task
	if !t.fence.enter() {
		return false, ErrCancelled
	}
	defer t.fence.leave() // also when the copy panics: the fence must be able to close
	done, err = read(ExtentRange{Plan: w.plan, Lo: lo, Hi: hi, Unit: t.chunk.Unit, Blocks: t.chunk.Blocks, Base: base, Table: w.table})
	if done && err == nil {
		err = t.stillOurs()
	}
	if done && err == nil && hi == len(w.plan.Extents()) {
		g := w.plan.Geometry()
		t.fence.settle(t.index, nil, g.PageBytes())
	}
	return done, err
}

// stillOurs fails if the client has withdrawn the store before the pages were read.
func (t *storeTask) stillOurs() error {
	if t.withdrawn == nil {
		return nil
	}
	back, err := t.withdrawn()
	if err == nil && back {
		err = fmt.Errorf("%w: its client has withdrawn it", ErrCancelled)
	}
	return err
}
