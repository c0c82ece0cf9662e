package transfer

import (
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/staging"
)

// stagedRoute takes every piece, and moves it through slots of this process's memory; see the package comment.
type stagedRoute struct{}

func (stagedRoute) store(t *storeTask, f staging.File) error {
	t.span.setRoute(byStaging)
	q, put := t.queue, t.chunk.Put
	return q.engine.withSlot(func(slot []byte) (err error) {
		scratch := q.takeScratch(len(put.Plan().Extents()))
		defer q.scratch.Put(scratch)
		w := &pieceWriter{task: t, plan: put.Plan(), table: scratch.table, file: f}
		if put.Compresses() {
			t.size, err = w.compressed(slot, scratch.forStored())
			return err
		}
		w.buf = q.engine.ioBuffer(t.memory, slot, f, put.DataOffset())
		if put.FileBytes() <= int64(len(w.buf)) {
			return w.whole()
		}
		return w.parts()
	})
}

// load reads the head, and the first extents to deliver if they follow it directly.
func (stagedRoute) load(l *loading) error {
	l.span.setRoute(byStaging)
	if err := l.acquire(); err != nil {
		return err
	}
	want, first := l.piece.Expected(), l.piece.Size()
	if l.parts != nil {
		if !want.Plan.Geometry().Equal(l.memory.Geometry()) {
			return ErrGeometry
		}
		first = want.DataOffset
		if run := l.runs(want.Plan)[0]; run.lo == 0 {
			first += end(want.Plan.Extents()[run.hi-1])
		}
	}
	l.buf = l.engine.ioBuffer(l.memory, l.slot, l.piece.File(), want.DataOffset)
	head, have, err := l.begin((first + 4095) &^ 4095)
	if err != nil {
		return err
	}
	l.head, l.source = head, stagedRoute{}
	run := l.runs(head.Plan)[0]
	for run.lo == 0 && l.done < run.hi && endInFile(head, l.done) <= have {
		l.done++
	}
	if done := l.done; done > 0 {
		l.last = func() error { return l.scatter(head, 0, done, -head.DataOffset) }
	}
	return nil
}

func (stagedRoute) bring(r *pieceReader, head *store.Head, lo, hi int) (last func() error, err error) {
	if r.slot == nil { // another step read the head
		if err := r.acquire(); err != nil {
			return nil, err
		}
		r.buf = r.engine.ioBuffer(r.memory, r.slot, r.piece.File(), 0)
		if head.Compressed {
			r.divide(!hasCoder(r.memory))
		}
	}
	return r.readRun(head, lo, hi)
}

// acquire takes a slot until the task ends.
func (r *pieceReader) acquire() (err error) {
	if r.held, err = r.engine.slots.Acquire(r.engine.ctx); err != nil {
		return ErrClosed
	}
	r.slot = r.held.Bytes()
	if r.fence.isShut() { // the job may have been cancelled while this waited
		return ErrCancelled
	}
	return nil
}
