package transfer

import (
	"fmt"

	"github.com/kvhost/kvhost/host/store"
	"github.com/kvhost/kvhost/staging"
)

// The memory route of a piece: its file is memory of this process, page-locked where there is a GPU. Pages are gathered
// into the file and scattered from it. No slot and no read or write is between them.
//
//	store:  pages --gather+checksum--> file
//	load:   file --verify, then scatter--> pages
//
// A file has one segment of memory, or a few. An extent that crosses from one to the next goes through a slot.

// memoryOf returns the memory of a file of so many bytes, or nil if the file is elsewhere, or has its head in pieces.
func memoryOf(f staging.File, size, head int64) (staging.Segments, error) {
	segments, err := staging.MemoryOf(f, size)
	if err != nil || len(segments) == 0 || int64(len(segments[0])) < head {
		return nil, err
	}
	return segments, nil
}

// memoryPart is how much of a file's memory is moved at a time.
func (e *Engine) memoryPart(m Memory) int64 {
	if _, ok := m.(flaggedMemory); ok {
		return int64(e.gpuCopyBytes())
	}
	return cachedIOBytes
}

// memoryParts calls move for extents [lo, hi) in parts: each is the memory of some extents, and base the payload's
// offset of its first byte. Extents that cross from one segment to the next are left to cross, one at a time.
func memoryParts(s staging.Segments, head *store.Head, lo, hi int, most int64,
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

// useMemory reads the head of a piece in memory, and prepares r to deliver from there. Without one it returns nil.
func (r *pieceReader) useMemory() (*store.Head, error) {
	size := r.piece.Size()
	if size%4096 != 0 || size < 4096 {
		return nil, nil // left to the staged route to reject
	}
	segments, err := memoryOf(r.piece.File(), size, 4096)
	if segments == nil {
		return nil, err
	}
	first := segments[0][:min(int64(len(segments[0])), size)]
	head, err := r.judge(r.piece.Verify(first))
	if err == nil && (head.Table == nil || head.Compressed) { // its memory is in pieces, or it has no page bytes
		return nil, nil
	}
	if err == nil && head.DataOffset+head.Plan.PayloadBytes() > size {
		err = fmt.Errorf("%w: %s ends before its payload does", ErrDamaged, r.piece.File().Name())
	}
	if err != nil {
		return nil, err
	}
	r.segments = segments
	return head, nil
}

// deliver verifies and scatters extents [lo, hi) of a piece in memory.
func (r *pieceReader) deliver(head *store.Head, lo, hi int) error {
	move := func(lo, hi int, mem []byte, base int64) error { return r.scatterFrom(mem, head, lo, hi, base) }
	cross := func(x int) error {
		extent := head.Plan.Extents()[x]
		return r.engine.withSlot(func(slot []byte) error {
			mem := slot[:extent.Len]
			r.segments.Read(mem, head.DataOffset+extent.Off)
			return r.scatterFrom(mem, head, x, x+1, extent.Off)
		})
	}
	return memoryParts(r.segments, head, lo, hi, r.engine.memoryPart(r.memory), move, cross)
}

// withSlot runs fn with a slot.
func (e *Engine) withSlot(fn func(slot []byte) error) error {
	slot, err := e.slots.Acquire(e.ctx)
	if err != nil {
		return ErrClosed
	}
	defer slot.Release()
	return fn(slot.Bytes())
}

// readMemory loads a piece in memory. When done, err is the result; otherwise the piece is elsewhere.
func (t *loadTask) readMemory() (done bool, err error) {
	r := &pieceReader{engine: t.queue.engine, fence: t.fence, memory: t.spec.Memory, piece: t.piece,
		ids: t.spec.Chunks[t.index].Blocks}
	head, err := r.useMemory()
	if head == nil {
		return err != nil, err
	}
	t.span.setRoute(byMemory)
	return true, r.deliver(head, 0, len(head.Plan.Extents()))
}

// writeMemory stores a piece in memory. It settles the chunk as soon as its pages have been read.
func (t *storeTask) writeMemory(s staging.Segments) error {
	q, put := t.queue, t.chunk.Put
	plan, offset := put.Plan(), put.DataOffset()
	extents := plan.Extents()
	scratch := q.takeScratch(len(extents))
	defer q.scratch.Put(scratch)
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
	if err := memoryParts(s, &head, 0, len(extents), q.engine.memoryPart(t.memory), move, cross); err != nil {
		return err
	}
	put.Head(s[0][:offset], scratch.table)
	return nil
}
