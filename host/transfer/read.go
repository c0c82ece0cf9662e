package transfer

import (
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/kvhost/kvhost/host/store"
	"github.com/kvhost/kvhost/staging"
)

// LoadJob reads leased chunks back.
type LoadJob struct {
	Lease  *store.Lease
	Rank   uint32
	Memory Memory
	Chunks []LoadChunk
	// Held keeps the load from beginning before Handle.Begin is called.
	Held bool
	// Layers makes the load layer-wise. Optional.
	Layers *Layers
	// Done runs once. Every chunk that was not delivered and verified in full is in Failed.
	Done func(Outcome)
}

// LoadChunk is one entry of the lease and where its blocks go.
type LoadChunk struct {
	Index  int      // within the lease
	Blocks []uint32 // the client's block id for each block of the chunk; abi.None for one that is not wanted
}

// Load queues a job.
func (q *Queue) Load(l *LoadJob) *Handle {
	j := newJob(len(l.Chunks), l.Done, nil)
	l = l.guarded(j)
	if len(l.Chunks) == 0 {
		j.cancel()
	}
	h := &Handle{j: j}
	begin := func() {
		for i := range l.Chunks {
			t := &load{queue: q, job: j, spec: l, index: i}
			if err := q.workers.SubmitTo(l.Lease.Root(l.Chunks[i].Index), staging.Read, t.run); err != nil {
				t.end(ErrClosed)
			}
		}
	}
	if l.Layers != nil {
		h.layered = q.loadLayers(j, l)
		begin = h.layered.begin
	}
	if l.Held {
		h.begin = sync.OnceFunc(begin)
	} else {
		begin()
	}
	return h
}

// load is the task of one chunk. Its last copy runs on the engine's copiers, so that the thread that read the file can
// go on to the next: the device has as many requests outstanding as there are threads, also while bytes are copied.
type load struct {
	queue *Queue
	job   *job
	spec  *LoadJob
	index int

	slot    *staging.Slot
	piece   *store.Piece
	trip    trip
	suspect attempt // whose bytes were wrong, so that the piece was staged
}

func (t *load) run() {
	err := errPanicked // until the task has run to its end
	over := true
	defer func() {
		if over {
			t.end(err)
		}
	}()
	var last func() error
	if last, err = t.read(); last == nil {
		return
	}
	if !t.piece.File().Direct() { // this processor's cache has the bytes, and there is no device to keep busy
		err = last()
		return
	}
	if t.queue.engine.copiers.Submit(staging.Read, func() { t.finish(last) }) == nil {
		over = false
		return
	}
	err = last()
}

func (t *load) finish(last func() error) {
	err := errPanicked
	defer func() { t.end(err) }()
	err = last()
}

// read brings the piece into the slot and gives what is left to be done: the copy of its last window.
func (t *load) read() (last func() error, err error) {
	c, e := &t.spec.Chunks[t.index], t.queue.engine
	if err := checkBlocks(t.spec.Memory, c.Blocks, true); err != nil {
		return nil, err
	}
	if t.job.isShut() { // the job was cancelled while this waited: spare the disk
		return nil, ErrCancelled
	}
	if t.piece, err = t.spec.Lease.Open(c.Index, t.spec.Rank); err != nil {
		return nil, err
	}
	t.trip = t.queue.depart(t.piece.Root(), staging.Read)
	if r := e.direct(t.spec.Memory, t.piece.Root()); r.route != nil {
		t.trip.take(byCuFile)
		done, suspect, err := t.loadDirect(r)
		if done {
			return nil, err
		}
		t.trip.take(byStaging)
		if suspect {
			t.suspect = r
		}
	}
	if t.slot, err = e.slots.Acquire(e.ctx); err != nil {
		return nil, ErrClosed
	}
	if t.job.isShut() {
		return nil, ErrCancelled
	}
	r := &pieceReader{engine: e, job: t.job, memory: t.spec.Memory, piece: t.piece, ids: c.Blocks, slot: t.slot.Bytes()}
	return r.read()
}

func (t *load) end(err error) {
	switch {
	case t.suspect.route == nil:
	case err == nil: // the file was right
		t.suspect.failed(&t.suspect.mismatched, ErrDamaged, true)
	default:
		t.suspect.passed()
	}
	t.queue.ended(&t.trip, t.piece, err)
	if t.slot != nil {
		t.queue.engine.release(t.slot, err)
	}
	t.job.settled(t.index, t.spec.Memory, err)
}

// ended books how a piece's load ended, and closes the piece if it was opened.
func (q *Queue) ended(on *trip, p *store.Piece, err error) {
	if p != nil {
		on.arrive(p.Size(), err)
	}
	if err != nil {
		q.engine.stats.loadErrors.Add(1)
		blame(p, err)
	} else {
		q.engine.stats.loaded(p.Size())
	}
	if p != nil {
		p.Close()
	}
}

// blame has the entry dropped whose piece could not be read: what failed once must not be promised again. What the client,
// its GPU or the engine's end is the reason of says nothing of the piece.
func blame(p *store.Piece, err error) {
	if p == nil {
		return
	}
	for _, other := range [...]error{ErrCancelled, ErrDevice, ErrClosed, ErrBlocks, ErrGeometry} {
		if errors.Is(err, other) {
			return
		}
	}
	p.Bad(err)
}

// settled ends chunk i of a load.
func (j *job) settled(i int, m Memory, err error) {
	var bytes int64
	if err == nil {
		g := m.Geometry()
		bytes = g.PageBytes()
	}
	j.settle(i, err, bytes)
	j.over()
}

type pieceReader struct {
	engine *Engine
	job    *job
	memory Memory
	piece  *store.Piece
	ids    []uint32
	slot   []byte
	buf    []byte // the part of the slot in use
}

// read goes through the file window by window, each starting at a 4 KiB boundary. Extents that lie wholly within the
// window are verified and scattered; the rest of the window is carried to the front of the next. The scatter of the last
// window is left to the caller.
func (r *pieceReader) read() (last func() error, err error) {
	size := r.piece.Size()
	r.buf = r.engine.window(r.memory, r.slot, r.piece.File(), 0)
	head, have, err := r.begin(size) // the file's bytes [start, start+have) are in buf
	if err != nil {
		return nil, err
	}
	extents := head.Plan.Extents()
	start := int64(0)
	for lo := 0; lo < len(extents); {
		base := start - head.DataOffset // payload offset of buf[0]; negative while the header is in it
		hi := lo
		for hi < len(extents) && end(extents[hi])-base <= have {
			hi++
		}
		if hi == len(extents) {
			return func() error { return r.scatter(head, lo, hi, base) }, nil
		}
		if hi > lo {
			if err := r.scatter(head, lo, hi, base); err != nil {
				return nil, err
			}
			lo = hi
		}
		keep := (head.DataOffset + extents[lo].Off) &^ 4095
		if keep < start || keep > start+have {
			keep = start + have
		}
		kept := int64(copy(r.buf, r.buf[keep-start:have]))
		n, err := r.fill(kept, keep+kept, size)
		if err != nil {
			return nil, err
		}
		start, have = keep, kept+n
	}
	return nil, nil
}

// begin reads the file's first bytes, up to offset first and what buf holds, and judges the file by them.
func (r *pieceReader) begin(first int64) (head *store.Head, have int64, err error) {
	size := r.piece.Size()
	if size%4096 != 0 || size < 4096 {
		return nil, 0, fmt.Errorf("%w: %s is %d bytes long", ErrDamaged, r.piece.File().Name(), size)
	}
	if have, err = r.fill(0, 0, min(size, first)); err != nil {
		return nil, 0, err
	}
	head, err = r.piece.Verify(r.buf[:have])
	if err == nil && head.DataOffset > have { // an unusually long table, or of another plan than was expected
		r.buf = r.slot
		var more int64
		if more, err = r.fill(have, have, size); err != nil {
			return nil, 0, err
		}
		have += more
		head, err = r.piece.Verify(r.buf[:have])
	}
	switch {
	case err != nil:
		return nil, 0, fmt.Errorf("%w: %w", ErrDamaged, err)
	case head.Table == nil:
		return nil, 0, fmt.Errorf("%w: %s has a checksum table that no slot holds", ErrDamaged, r.piece.File().Name())
	case !sameShape(head.Plan.Geometry(), r.memory.Geometry()):
		return nil, 0, ErrGeometry
	}
	return head, have, nil
}

// fill reads as much of the file as there is room for from file offset off to buf[at:].
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
	if !r.job.enter() {
		return ErrCancelled
	}
	defer r.job.leave() // also when the copy panics: the fence must be able to close
	return r.memory.Scatter(head.Plan, lo, hi, r.ids, r.buf, base, head.Table)
}
