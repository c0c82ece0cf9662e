package transfer

import (
	"fmt"
	"sync"

	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/store"
	"github.com/kvhost/kvhost/staging"
)

// StoreJob writes chunks that have their places reserved.
type StoreJob struct {
	Memory Memory
	Chunks []StoreChunk
	// Held keeps the store from beginning before Handle.Begin is called.
	Held bool
	// Read runs once, when no task will read the pages any more: the client may use its blocks again. Failed lists
	// what is known to have failed by then.
	Read func(Outcome)
	// Published runs once, after Read, when every chunk is published at the configured durability or has failed.
	Published func(Outcome)
}

// StoreChunk is one piece of a StoreJob. The job owns Put: it is published or aborted, whatever happens.
type StoreChunk struct {
	Put    *store.Put
	Blocks []uint32 // the client's block id for each block of the chunk
}

// Store queues a job. Every Put of it is taken over even if the engine is closed.
func (q *Queue) Store(s *StoreJob) *Handle {
	j := newJob(len(s.Chunks), s.Read, s.Published)
	s = s.guarded(j)
	if len(s.Chunks) == 0 {
		j.cancel()
	}
	begin := func() {
		giveUp := func(i int, err error) {
			s.Chunks[i].Put.Abort(err)
			j.settle(i, err, 0)
			j.over()
		}
		turns := newTurns(len(s.Chunks), q.engine.cfg.WriteQueue, func(i int) {
			q.engine.stats.storesShed.Add(1)
			giveUp(i, ErrShed)
		})
		for i := range s.Chunks {
			task := func() {
				if turns.take(i) {
					q.storeChunk(j, i, s)
				}
			}
			if err := q.workers.SubmitTo(s.Chunks[i].Put.Root(), staging.Write, task); err != nil && turns.take(i) {
				giveUp(i, ErrClosed)
			}
		}
	}
	h := &Handle{j: j}
	if s.Held {
		h.begin = sync.OnceFunc(begin)
	} else {
		begin()
	}
	return h
}

func (q *Queue) storeChunk(j *job, i int, s *StoreJob) {
	c := &s.Chunks[i]
	err := errPanicked // until the task has run to its end
	on := q.depart(c.Put.Root(), staging.Write)
	defer func() {
		on.arrive(c.Put.FileBytes(), err)
		if err != nil {
			c.Put.Abort(err)
			j.settle(i, err, 0)
			j.fail(i, err)
			q.engine.stats.storeErrors.Add(1)
		} else {
			q.engine.stats.stored(c.Put)
		}
		j.over()
	}()
	if err = q.writeAndPublish(&on, j, i, s.Memory, c); err != nil && q.engine.ctx.Err() != nil {
		err = fmt.Errorf("%w: %w", ErrClosed, err)
	}
}

func (q *Queue) writeAndPublish(on *trip, j *job, i int, m Memory, c *StoreChunk) error {
	if err := checkBlocks(m, c.Blocks, false); err != nil {
		return err
	}
	if err := q.writePiece(on, j, i, m, c); err != nil {
		return err
	}
	return c.Put.Publish(q.engine.ctx)
}

// writePiece fills the temporary. It settles the chunk as soon as its pages have been read.
func (q *Queue) writePiece(on *trip, j *job, i int, m Memory, c *StoreChunk) (err error) {
	plan := c.Put.Plan()
	if !sameShape(plan.Geometry(), m.Geometry()) {
		return ErrGeometry
	}
	f, err := c.Put.File()
	if err != nil {
		return err
	}
	if r := q.engine.direct(m, c.Put.Root()); r.route != nil {
		on.take(byCuFile)
		if done, err := q.writeDirect(on, r, j, i, m.(guardedMemory), c, f); done {
			return err
		}
		on.take(byStaging)
	}
	slot, err := q.engine.slots.Acquire(q.engine.ctx)
	if err != nil {
		return ErrClosed
	}
	defer func() { q.engine.release(slot, err) }()
	scratch := q.takeScratch(len(plan.Extents()))
	defer q.scratch.Put(scratch)
	w := &pieceWriter{job: j, index: i, memory: m, chunk: c, plan: plan, table: scratch.table, file: f}
	w.buf = q.engine.window(m, slot.Bytes(), f, c.Put.DataOffset())
	if c.Put.FileBytes() <= int64(len(w.buf)) {
		return w.whole()
	}
	return w.parts()
}

// cachedWindow is how much of a file that lives in the page cache is moved at a time: little enough that the second
// copy finds the bytes of the first in the processor's cache. A device, by contrast, wants large requests.
const cachedWindow = 1 << 20

// window is the part of a slot to use for a file; it holds at least the first head bytes of it.
func window(slot []byte, f staging.File, head int64) []byte {
	if f.Direct() {
		return slot
	}
	return slot[:min(int64(len(slot)), max(cachedWindow, head))]
}

type pieceWriter struct {
	job    *job
	index  int
	memory Memory
	chunk  *StoreChunk
	plan   *chunk.Plan
	table  []uint64
	file   staging.File
	buf    []byte
}

// whole writes the file's image, header first in the file and last in time, with one call: no byte of the header
// reaches the file before the payload's does.
func (w *pieceWriter) whole() error {
	put := w.chunk.Put
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

// parts writes a payload larger than the slot window by window, each starting at a 4 KiB boundary of the file: what a
// window holds beyond its last boundary is carried to the front of the next. The header and the table go last.
func (w *pieceWriter) parts() error {
	put := w.chunk.Put
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
	if !w.job.enter() {
		return ErrCancelled
	}
	defer w.job.leave() // also when the copy panics: the fence must be able to close
	err := w.memory.Gather(w.plan, lo, hi, w.chunk.Blocks, dst, base, w.table)
	if err == nil && hi == len(extents) {
		g := w.plan.Geometry()
		w.job.settle(w.index, nil, g.PageBytes())
	}
	return err
}

func end(e chunk.Extent) int64 { return e.Off + int64(e.Len) }
