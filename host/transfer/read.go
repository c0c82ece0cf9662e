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
	if len(l.Chunks) == 0 {
		j.cancel()
	}
	var progress *layers
	if l.Layer != nil {
		progress = newLayers(l.Memory.Geometry(), len(l.Chunks), l.Layer)
	}
	for i := range l.Chunks {
		task := func() {
			bytes, err := int64(0), errPanicked // until the task has run to its end
			defer func() {
				if err != nil {
					q.engine.stats.loadErrors.Add(1)
				}
				j.settle(i, err, bytes)
				j.over()
			}()
			bytes, err = q.loadChunk(j, l, &l.Chunks[i], progress)
		}
		if err := q.workers.Submit(staging.Read, task); err != nil {
			j.settle(i, ErrClosed, 0)
			j.over()
		}
	}
	return &Handle{j}
}

func (q *Queue) loadChunk(j *job, l *LoadJob, c *LoadChunk, progress *layers) (int64, error) {
	if err := checkBlocks(l.Memory, c.Blocks, true); err != nil {
		return 0, err
	}
	slot, err := q.engine.slots.Acquire(q.engine.ctx)
	if err != nil {
		return 0, ErrClosed
	}
	defer slot.Release()
	if !j.enter() { // the job was cancelled while this waited: spare the disk
		return 0, ErrCancelled
	}
	j.leave()
	piece, err := l.Lease.Open(c.Index, l.Rank)
	if err != nil {
		return 0, err
	}
	defer piece.Close()
	r := &pieceReader{job: j, memory: l.Memory, piece: piece, ids: c.Blocks, slot: slot.Bytes(), progress: progress}
	if err := r.read(); err != nil {
		// Whatever could not be read once must not be promised again: the next lookup is to miss.
		if !errors.Is(err, ErrCancelled) {
			piece.Bad(err)
		}
		return 0, err
	}
	g := l.Memory.Geometry()
	q.engine.stats.loaded(piece.Size())
	return g.PageBytes(), nil
}

type pieceReader struct {
	job      *job
	memory   Memory
	piece    *store.Piece
	ids      []uint32
	slot     []byte
	buf      []byte // the part of the slot in use
	progress *layers
}

// read goes through the file window by window, each starting at a 4 KiB boundary. Extents that lie wholly within the
// window are verified and scattered; the rest of the window is carried to the front of the next.
func (r *pieceReader) read() error {
	size := r.piece.Size()
	if size%4096 != 0 || size < 4096 {
		return fmt.Errorf("%w: %s is %d bytes long", ErrDamaged, r.piece.File().Name(), size)
	}
	r.buf = window(r.slot, r.piece.File(), 0)
	have, err := r.fill(0, 0, size) // the file's bytes [start, start+have) are in buf
	if err != nil {
		return err
	}
	head, err := r.piece.Verify(r.buf[:have])
	if err == nil && head.DataOffset > have { // an unusually long table
		r.buf = r.slot
		var more int64
		if more, err = r.fill(have, have, size); err != nil {
			return err
		}
		have += more
		head, err = r.piece.Verify(r.buf[:have])
	}
	if err != nil {
		return fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	if head.Table == nil {
		return fmt.Errorf("%w: %s has a checksum table that no slot holds", ErrDamaged, r.piece.File().Name())
	}
	if !sameShape(head.Plan.Geometry(), r.memory.Geometry()) {
		return ErrGeometry
	}
	extents := head.Plan.Extents()
	start := int64(0)
	for lo := 0; lo < len(extents); {
		base := start - head.DataOffset // payload offset of buf[0]; negative while the header is in it
		hi := lo
		for hi < len(extents) && end(extents[hi])-base <= have {
			hi++
		}
		if hi > lo {
			if err := r.scatter(head, lo, hi, base); err != nil {
				return err
			}
			lo = hi
		}
		if lo == len(extents) {
			return nil
		}
		keep := (head.DataOffset + extents[lo].Off) &^ 4095
		if keep < start || keep > start+have {
			keep = start + have
		}
		kept := int64(copy(r.buf, r.buf[keep-start:have]))
		n, err := r.fill(kept, keep+kept, size)
		if err != nil {
			return err
		}
		start, have = keep, kept+n
	}
	return nil
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
	err := r.memory.Scatter(head.Plan, lo, hi, r.ids, r.buf, base, head.Table)
	r.job.leave()
	if err == nil && r.progress != nil {
		r.progress.landed(head.Plan, lo, hi)
	}
	return err
}
