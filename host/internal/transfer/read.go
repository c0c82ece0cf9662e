package transfer

import (
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// LoadJob reads leased chunks back.
type LoadJob struct {
	Tenant uint32 // tenants take turns for workers
	Lease  *store.Lease
	Rank   uint32 // rank of the piece of the memory's first unit; those of its other units follow
	Memory Memory
	Chunks []LoadChunk
	// Held keeps the load from starting before Handle.Begin is called.
	Held bool
	// Layers makes the load layer-wise. Optional.
	Layers *Layers
	// Files decides about each file that a layer-wise load would keep open between its steps. A file that is not kept
	// is opened again. Optional.
	Files interface {
		Keep() bool
		Gone() // ends a kept file
	}
	// Done runs once. Every chunk that was not delivered and verified in full is in Failed.
	Done func(Outcome)
	// Paths collects the roots and routes of the pieces. Optional.
	Paths *Paths
}

// LoadChunk is one entry of the lease and the blocks that it fills.
type LoadChunk struct {
	Index  int      // entry's index in the lease
	Unit   int      // unit of the memory
	Blocks []uint32 // the client's block ids, in the chunk's order; abi.None for a block that is not to be copied
}

// open opens the piece of a chunk.
func (l *LoadJob) open(chunk int) (*store.Piece, error) {
	c := &l.Chunks[chunk]
	return l.Lease.Open(c.Index, l.Rank+uint32(c.Unit))
}

// loadTask loads one chunk of a job.
type loadTask struct {
	loading
	queue *Queue
	spec  *LoadJob
	index int
	on    span
}

func (t *loadTask) run() { t.engine.runLoad(t.spec, t) }

// runLoad runs a task that reads and then copies. If read returns the last copy as a function, it runs on the engine's
// copiers. end runs exactly once.
func (e *Engine) runLoad(l *LoadJob, t interface {
	read() (last func() error, err error)
	end(err error)
}) {
	err := errPanicked // until the task has run to its end
	handedOver := false
	defer func() {
		if !handedOver {
			t.end(err)
		}
	}()
	last, readErr := t.read()
	if last == nil {
		err = readErr
		return
	}
	copying := func() {
		err := errPanicked
		defer func() { t.end(err) }()
		err = last()
	}
	g := l.Memory.Geometry()
	if handedOver = e.copiers.SubmitTo("", l.Tenant, staging.Read, g.PageBytes(), copying) == nil; !handedOver {
		err = last()
	}
}

// read delivers the piece to the pages, except for the copy that last makes.
func (t *loadTask) read() (last func() error, err error) {
	if err := CheckBlocks(t.memory, t.ids, true); err != nil {
		return nil, err
	}
	if t.fence.isShut() { // cancelled while queued: no read is needed
		return nil, ErrCancelled
	}
	if t.piece, err = t.spec.open(t.index); err != nil {
		return nil, err
	}
	t.on = t.queue.startSpan(t.piece.Root(), staging.Read, t.spec.Paths)
	t.span = &t.on
	if err := t.open(); err != nil {
		return nil, err
	}
	return t.deliver()
}

func (t *loadTask) end(err error) {
	if t.verdict != nil {
		t.verdict(err)
	}
	t.engine.closePiece(&t.on, t.piece, err)
	t.engine.release(t.held, err)
	t.fence.endLoad(t.index, t.memory, err)
}

// closePiece counts the end of a piece's load, reports damage, and closes the piece if it was opened.
func (e *Engine) closePiece(on *span, p *store.Piece, err error) {
	if p != nil {
		on.finish(p.Size(), err)
	}
	if err != nil {
		e.stats.loadErrors.Add(1)
		reportDamage(p, err)
	} else {
		e.stats.loaded(p.Size())
	}
	if p != nil {
		p.Close()
	}
}

// reportDamage makes the store drop the entry of a piece that could not be read, so that a failed entry is not promised
// again. Errors of the client, its memory, its GPU or a closing engine say nothing about the piece.
func reportDamage(p *store.Piece, err error) {
	if p == nil {
		return
	}
	for _, other := range [...]error{ErrCancelled, ErrMemory, ErrDevice, ErrClosed, ErrBlocks, ErrGeometry} {
		if errors.Is(err, other) {
			return
		}
	}
	p.Bad(err)
}

// endLoad ends chunk i of a load.
func (f *fence) endLoad(i int, m Memory, err error) {
	var bytes int64
	if err == nil {
		g := m.Geometry()
		bytes = g.PageBytes()
	}
	f.settle(i, err, bytes)
	f.taskDone()
}

// loading is the load of one piece, or of its part in one step of a layer-wise load.
type loading struct {
	pieceReader
	parts parted // nil: the whole piece
	all   [1]run
	span  *span // measures the piece

	// A route sets head, source, done and last when it takes the piece. It sets verdict when it refuses a whole piece
	// because of wrong bytes.
	head    *store.Head
	source  source
	done    int          // extents below this are delivered, except for the copy that last makes
	last    func() error // optional
	verdict func(error)  // gets the outcome of the routes asked next; optional
}

// parted is a load that delivers a part of a piece.
type parted interface {
	// partOf returns the extents of a plan to deliver.
	partOf(p *kv.Plan) []run
}

// runs returns the extents of a plan to deliver.
func (l *loading) runs(p *kv.Plan) []run {
	if l.parts != nil {
		return l.parts.partOf(p)
	}
	l.all[0] = run{0, len(p.Extents())}
	return l.all[:]
}

// open opens the piece by the first route that takes it.
func (l *loading) open() (err error) {
	for _, way := range l.engine.routes {
		if err = way.load(l); !errors.Is(err, errNotHere) {
			break
		}
	}
	return err
}

// deliver delivers the remaining extents. If they came from a device, the last copy is returned for the engine's
// copiers: this worker can then start the next read, and the device always has as many requests as there are workers.
// Bytes from the page cache are in this CPU's cache, and are copied here.
func (l *loading) deliver() (last func() error, err error) {
	last = l.last
	for _, run := range l.runs(l.head.Plan) {
		lo := max(run.lo, l.done)
		if lo >= run.hi {
			continue
		}
		if last != nil { // the slot is needed for the next run
			if err = last(); err != nil {
				return nil, err
			}
		}
		if last, err = l.source.bring(&l.pieceReader, l.head, lo, run.hi); err != nil {
			return nil, err
		}
	}
	if last != nil && !l.piece.File().Direct() {
		return nil, last()
	}
	return last, nil
}

// pieceReader delivers extents of a piece to pages.
type pieceReader struct {
	engine *Engine
	fence  *fence
	memory Memory
	piece  *store.Piece
	unit   int
	ids    []uint32

	held  *staging.Slot // held until the task ends; nil if the route needs no slot
	slot  []byte
	buf   []byte // the part of the slot in use
	pages []byte // the part for page bytes of a compressed piece

	bundle  *bundle // makes the copies from memory, with those of other pieces; nil: the reader makes them itself
	bundled bool    // the bundle has had copies of this piece
	late    error   // the first error of a piece with copies in a bundle
}

func newReader(q *Queue, f *fence, l *LoadJob, i int) pieceReader {
	return pieceReader{engine: q.engine, fence: f, memory: l.Memory, unit: l.Chunks[i].Unit, ids: l.Chunks[i].Blocks}
}

func endInFile(head *store.Head, extent int) int64 {
	_, end := head.At(extent)
	return end
}

// begin reads the first bytes of the file, at most first and as many as buf holds, and verifies its head.
func (r *pieceReader) begin(first int64) (head *store.Head, have int64, err error) {
	size := r.piece.Size()
	if size%4096 != 0 || size < 4096 {
		return nil, 0, fmt.Errorf("%w: %s is %d bytes long", ErrDamaged, r.piece.File().Name(), size)
	}
	if r.piece.Expected().Compressed {
		r.divide(!hasCoder(r.memory))
	}
	if have, err = r.fill(0, 0, min(size, first)); err != nil {
		return nil, 0, err
	}
	head, err = r.piece.Verify(r.buf[:have])
	if err == nil && head.DataOffset > have { // the table is longer than expected, or of another plan
		r.buf = r.slot
		var more int64
		if more, err = r.fill(have, have, size); err != nil {
			return nil, 0, err
		}
		have += more
		head, err = r.piece.Verify(r.buf[:have])
	}
	if head, err = r.judge(head, err); err == nil && head.Table == nil {
		err = fmt.Errorf("%w: %s has a checksum table that no slot holds", ErrDamaged, r.piece.File().Name())
	}
	if err != nil {
		return nil, 0, err
	}
	if head.Compressed {
		r.divide(!hasCoder(r.memory))
		have = min(have, int64(len(r.buf)))
	}
	return head, have, nil
}

// judge returns a verified head if its piece fits the memory, else an error. err is the error of the verification.
func (r *pieceReader) judge(head *store.Head, err error) (*store.Head, error) {
	switch {
	case err != nil:
		return nil, fmt.Errorf("%w: %w", ErrDamaged, err)
	case !head.Plan.Geometry().Equal(r.memory.Geometry()):
		return nil, ErrGeometry
	}
	return head, nil
}

// fill reads from file offset off into buf[at:] until the buffer is full or size bytes are read.
func (r *pieceReader) fill(at, off, size int64) (int64, error) {
	want := min(int64(len(r.buf))-at, size-off)
	if want <= 0 {
		return 0, fmt.Errorf("%w: %s ends before its payload does", ErrDamaged, r.piece.File().Name())
	}
	n, err := r.piece.File().ReadAt(r.buf[at:at+want], off)
	if int64(n) == want {
		return want, nil
	}
	if err == nil || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return 0, fmt.Errorf("%w: %s: %d of %d bytes at %d", ErrDamaged, r.piece.File().Name(), n, want, off)
	}
	return 0, err
}

// scatter verifies and delivers extents [lo, hi), inside the fence.
func (r *pieceReader) scatter(head *store.Head, lo, hi int, base int64) error {
	if head.Compressed {
		return r.scatterCompressed(head, lo, hi, base)
	}
	err := r.scatterFrom(r.buf, head, lo, hi, base)
	if err == nil {
		r.piece.Keep(lo, hi, r.buf, base)
	}
	return err
}

func (r *pieceReader) extentRange(head *store.Head, lo, hi int, base int64) ExtentRange {
	return ExtentRange{Plan: head.Plan, Lo: lo, Hi: hi, Unit: r.unit, Blocks: r.ids, Base: base, Table: head.Table}
}

func (r *pieceReader) scatterFrom(src []byte, head *store.Head, lo, hi int, base int64) error {
	if !r.fence.enter() {
		return ErrCancelled
	}
	defer r.fence.leave() // also when the copy panics: the fence must be able to close
	x := r.extentRange(head, lo, hi, base)
	defer observe(&r.engine.scatters, r.memory, x.extents(), time.Now())
	return r.memory.Scatter(x, src)
}

// readRun reads extents [lo, hi), one buffer at a time, and delivers them. It returns the delivery of the last
// buffer.
func (r *pieceReader) readRun(head *store.Head, lo, hi int) (last func() error, err error) {
	for lo < hi {
		start, _ := head.At(lo)
		start &^= 4095
		base := start - head.DataOffset
		stop := func(x int) int64 { return (endInFile(head, x) + 4095) &^ 4095 }
		mid := lo + 1
		for mid < hi && stop(mid)-start <= int64(len(r.buf)) {
			mid++
		}
		if _, err := r.fill(0, start, stop(mid-1)); err != nil {
			return nil, err
		}
		if mid == hi {
			return func() error { return r.scatter(head, lo, hi, base) }, nil
		}
		if err := r.scatter(head, lo, mid, base); err != nil {
			return nil, err
		}
		lo = mid
	}
	return nil, nil
}
