package transfer

import (
	"errors"
	"fmt"
	"io"

	"github.com/kvhost/kvhost/host/store"
	"github.com/kvhost/kvhost/staging"
)

// LoadJob reads leased chunks back.
type LoadJob struct {
	Lease  *store.Lease
	Rank   uint32
	Memory Memory
	Chunks []LoadChunk
	// Layer runs once for each layer whose bytes of all chunks have landed, verified. Optional.
	Layer func(layer uint32)
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
	var progress *layers
	if l.Layer != nil {
		progress = newLayers(l.Memory.Geometry(), len(l.Chunks), l.Layer)
	}
	for i := range l.Chunks {
		t := &load{queue: q, job: j, spec: l, index: i, progress: progress}
		if err := q.workers.Submit(staging.Read, t.run); err != nil {
			t.end(ErrClosed)
		}
	}
	return &Handle{j}
}

// load is the task of one chunk. Its last copy runs on the engine's copiers, so that the thread that read the file can
// go on to the next: the device has as many requests outstanding as there are threads, also while bytes are copied.
type load struct {
	queue    *Queue
	job      *job
	spec     *LoadJob
	index    int
	progress *layers

	slot  *staging.Slot
	piece *store.Piece
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
	if t.slot, err = e.slots.Acquire(e.ctx); err != nil {
		return nil, ErrClosed
	}
	if !t.job.enter() { // the job was cancelled while this waited: spare the disk
		return nil, ErrCancelled
	}
	t.job.leave()
	if t.piece, err = t.spec.Lease.Open(c.Index, t.spec.Rank); err != nil {
		return nil, err
	}
	r := &pieceReader{engine: e, job: t.job, memory: t.spec.Memory, piece: t.piece, ids: c.Blocks, slot: t.slot.Bytes(), progress: t.progress}
	return r.read()
}

func (t *load) end(err error) {
	stats := &t.queue.engine.stats
	var bytes int64
	switch {
	case err == nil:
		g := t.spec.Memory.Geometry()
		bytes = g.PageBytes()
		stats.loaded(t.piece.Size())
	case t.piece != nil && !errors.Is(err, ErrCancelled) && !errors.Is(err, ErrDevice):
		// Whatever could not be read once must not be promised again: the next lookup is to miss.
		t.piece.Bad(err)
		fallthrough
	default:
		stats.loadErrors.Add(1)
	}
	if t.piece != nil {
		t.piece.Close()
	}
	if t.slot != nil {
		t.slot.Release()
	}
	t.job.settle(t.index, err, bytes)
	t.job.over()
}

type pieceReader struct {
	engine   *Engine
	job      *job
	memory   Memory
	piece    *store.Piece
	ids      []uint32
	slot     []byte
	buf      []byte // the part of the slot in use
	progress *layers
}

// read goes through the file window by window, each starting at a 4 KiB boundary. Extents that lie wholly within the
// window are verified and scattered; the rest of the window is carried to the front of the next. The scatter of the last
// window is left to the caller.
func (r *pieceReader) read() (last func() error, err error) {
	size := r.piece.Size()
	if size%4096 != 0 || size < 4096 {
		return nil, fmt.Errorf("%w: %s is %d bytes long", ErrDamaged, r.piece.File().Name(), size)
	}
	r.buf = r.engine.window(r.memory, r.slot, r.piece.File(), 0)
	have, err := r.fill(0, 0, size) // the file's bytes [start, start+have) are in buf
	if err != nil {
		return nil, err
	}
	head, err := r.piece.Verify(r.buf[:have])
	if err == nil && head.DataOffset > have { // an unusually long table
		r.buf = r.slot
		var more int64
		if more, err = r.fill(have, have, size); err != nil {
			return nil, err
		}
		have += more
		head, err = r.piece.Verify(r.buf[:have])
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	if head.Table == nil {
		return nil, fmt.Errorf("%w: %s has a checksum table that no slot holds", ErrDamaged, r.piece.File().Name())
	}
	if !sameShape(head.Plan.Geometry(), r.memory.Geometry()) {
		return nil, ErrGeometry
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
	err := func() error {
		defer r.job.leave() // also when the copy panics: the fence must be able to close
		return r.memory.Scatter(head.Plan, lo, hi, r.ids, r.buf, base, head.Table)
	}()
	if err == nil && r.progress != nil {
		r.progress.landed(head.Plan, lo, hi)
	}
	return err
}
