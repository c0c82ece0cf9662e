package transfer

import (
	"errors"
	"fmt"
	"time"

	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
)

// memoryRoute moves pieces whose files are memory of this process, page-locked if there is a GPU. It gathers pages into
// the file and scatters them from it, without a slot, a read or a write. It refuses compressed pieces unless the pages
// are on a GPU that codes them.
//
//	store:  pages --gather+checksum--> file
//	load:   file --verify, then scatter--> pages
//
// A file has one segment of memory, or a few. An extent that crosses into the next segment goes through a slot. A file
// for a compressed piece has room for the plain piece, and gives back the rest of its memory.
type memoryRoute struct{}

// inMemory is the memory of a file.
type inMemory struct{ staging.Segments }

// memoryOf returns the memory of a file of size bytes. It refuses a file that has no memory, or a head that crosses
// segments.
func memoryOf(f staging.File, size, head int64) (inMemory, error) {
	segments, err := staging.MemoryOf(f, size)
	if err == nil && (len(segments) == 0 || int64(len(segments[0])) < head) {
		err = errNotHere
	}
	return inMemory{segments}, err
}

// parts calls move for each run of extents in [lo, hi) that lies in one segment, with the memory of the run and base,
// the payload offset of its first byte. It calls cross for each extent that crosses segments.
func (s inMemory) parts(head *store.Head, lo, hi int, most int64,
	move func(lo, hi int, mem []byte, base int64) error, cross func(x int) error) error {
	extents := head.Plan.Extents()
	for lo < hi {
		start := (head.DataOffset + extents[lo].Off) &^ 4095
		base, mem := start-head.DataOffset, s.From(start)
		mem = mem[:min(int64(len(mem)), max(most, end(extents[lo])-base))]
		mid := lo
		for mid < hi && end(extents[mid])-base <= int64(len(mem)) {
			mid++
		}
		var err error
		if mid == lo {
			err = cross(lo)
			mid++
		} else {
			err = move(lo, mid, mem, base)
		}
		if err != nil {
			return err
		}
		lo = mid
	}
	return nil
}

func (memoryRoute) load(l *loading) error {
	size := l.piece.Size()
	if size%4096 != 0 || size < 4096 {
		return errNotHere // the staged route rejects it
	}
	memory, err := memoryOf(l.piece.File(), size, 4096)
	if err != nil {
		return err
	}
	first := memory.Segments[0]
	head, err := l.judge(l.piece.Verify(first[:min(int64(len(first)), size)]))
	switch {
	case err != nil:
		return err
	case head.Table == nil, head.Compressed && !hasCoder(l.memory): // the head crosses segments, or the piece needs a slot
		return errNotHere
	case !head.Compressed && head.DataOffset+head.Plan.PayloadBytes() > size:
		return fmt.Errorf("%w: %s ends before its payload does", ErrDamaged, l.piece.File().Name())
	}
	l.span.setRoute(byMemory)
	l.head, l.source = head, memory
	return nil
}

// bring implements [source]: it verifies and scatters extents [lo, hi), or has the reader's bundle do that.
func (s inMemory) bring(r *pieceReader, head *store.Head, lo, hi int) (last func() error, err error) {
	if head.Compressed {
		return nil, s.decode(r, head, lo, hi)
	}
	move := func(lo, hi int, mem []byte, base int64) error { return r.scatterFrom(mem, head, lo, hi, base) }
	began := time.Now()
	defer func() {
		if err == nil && r.bundle == nil {
			staging.Moved(r.piece.File(), staging.Read, pageBytes(head.Plan.Extents()[lo:hi]), time.Since(began))
		}
	}()
	if r.bundle != nil {
		move = func(lo, hi int, mem []byte, base int64) error {
			r.bundle.add(r, mem, head, lo, hi, base)
			return nil
		}
	}
	cross := func(x int) error {
		extent := head.Plan.Extents()[x]
		return r.engine.withSlot(func(slot []byte) error {
			mem := slot[:extent.Len]
			s.Read(mem, head.DataOffset+extent.Off)
			return r.scatterFrom(mem, head, x, x+1, extent.Off)
		})
	}
	return nil, s.parts(head, lo, hi, r.engine.memoryPart(r.memory), move, cross)
}

// decode decodes extents [lo, hi) of a compressed piece from the file's memory to the pages.
func (s inMemory) decode(r *pieceReader, head *store.Head, lo, hi int) error {
	for lo < hi {
		at := head.Offsets[lo]
		mem := s.From(head.DataOffset + at)
		mid := lo
		for mid < hi && head.Offsets[mid+1]-at <= int64(len(mem)) {
			mid++
		}
		if mid == lo { // the extent crosses segments
			if err := r.useSlot(); err != nil {
				return err
			}
			mid, mem = lo+1, r.slot[:head.Stored[lo].Len]
			s.Read(mem, head.DataOffset+at)
		}
		end, done, doubt, err := r.byGPU(head, lo, mid, image{host: mem}, at)
		if err == nil && !done {
			if err = r.useSlot(); err == nil {
				end, err = mid, r.again(head, lo, mid, doubt)
			}
		}
		if err != nil {
			return err
		}
		lo = end
	}
	return nil
}

// useSlot takes a slot for extents that the file's memory cannot be used for.
func (r *pieceReader) useSlot() error {
	if r.slot == nil {
		if err := r.acquire(); err != nil {
			return err
		}
	}
	r.buf = r.slot
	return nil
}

func (memoryRoute) store(t *storeTask, f staging.File) error {
	q, put := t.queue, t.chunk.Put
	plan, offset := put.Plan(), put.DataOffset()
	if put.Compresses() && !hasCoder(t.memory) {
		return errNotHere
	}
	s, err := memoryOf(f, put.FileBytes(), offset)
	if err != nil {
		return err
	}
	t.span.setRoute(byMemory)
	extents := plan.Extents()
	scratch := q.takeScratch(len(extents))
	defer q.scratch.Put(scratch)
	if put.Compresses() {
		w := &pieceWriter{task: t, plan: plan, table: scratch.table, file: f}
		return w.encodeInto(s, scratch.forStored())
	}
	began := time.Now()
	var from int64
	for _, e := range extents {
		s.Clear(offset+from, offset+e.Off) // gaps
		from = end(e)
	}
	s.Clear(offset+from, put.FileBytes())
	w := &pieceWriter{task: t, plan: plan, table: scratch.table}
	cross := func(x int) error {
		return q.engine.withSlot(func(slot []byte) error {
			mem := slot[:extents[x].Len]
			err := w.gatherTo(mem, x, x+1, extents[x].Off)
			if err == nil {
				s.Write(mem, offset+extents[x].Off)
			}
			return err
		})
	}
	move := func(lo, hi int, mem []byte, base int64) error { return w.gatherTo(mem, lo, hi, base) }
	head := store.Head{Plan: plan, DataOffset: offset}
	if err := s.parts(&head, 0, len(extents), q.engine.memoryPart(t.memory), move, cross); err != nil {
		return err
	}
	put.Head(s.Segments[0][:offset], scratch.table)
	staging.Moved(f, staging.Write, plan.PayloadBytes(), time.Since(began))
	return nil
}

// encodeInto has the GPU write the piece's stored extents to the file's memory. It can refuse the piece only while the
// pages are still needed, and leaves an empty file then.
func (w *pieceWriter) encodeInto(s inMemory, stored []pieceformat.Stored) (err error) {
	put, e := w.task.chunk.Put, w.task.queue.engine
	defer func() {
		if errors.Is(err, errNotHere) {
			if gone := staging.Shrink(w.file, 0); gone != nil {
				err = gone
			}
		}
	}()
	extents, at := w.plan.Extents(), put.DataOffset()
	var took time.Duration
	encode := func(mem []byte, lo, most int) (n, hi int, err error) {
		hi, base := coded(w.task.memory, extents, lo, most, int64(len(mem)))
		if hi == lo {
			return 0, hi, errNotHere
		}
		n, part, err := w.encode(lo, hi, base, image{host: mem}, stored)
		took += part
		return n, hi, err
	}
	for lo := 0; lo < len(extents); {
		var n, hi int
		mem := s.From(at)
		if mid, _ := fitting(extents, lo, lo+1, mem); mid > lo {
			n, hi, err = encode(mem, lo, len(extents))
		} else { // the extent may cross segments
			err = e.withSlot(func(slot []byte) (err error) {
				if n, hi, err = encode(slot, lo, lo+1); err == nil {
					s.Write(slot[:n], at)
				}
				return err
			})
		}
		if err != nil {
			return err
		}
		lo, at = hi, at+int64(n)
	}
	s.Clear(at, pieceformat.Padded(at))
	put.Encoded(pieceformat.StoredBytes(stored), took)
	w.task.size = put.HeadStored(s.Segments[0][:put.DataOffset()], w.table, stored)
	return staging.Shrink(w.file, w.task.size)
}
