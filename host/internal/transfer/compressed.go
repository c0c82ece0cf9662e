package transfer

import (
	"fmt"
	"time"

	"github.com/kvhost/kvhost/host/internal/codec"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
)

// The GPU codes a compressed piece of its own pages (gpucodec.go). Otherwise the piece is staged, and the processor
// codes its extents between the two parts of a slot.
//
//	store:  pages --gather+checksum--> end of the slot --encode--> its front --WriteAt--> temporary
//	load:   piece --ReadAt--> front --verify, decode--> end of the slot --verify, then scatter--> pages
//
// A decoder's input is verified against the checksum of its stored bytes, and its output against that of its page
// bytes, as in any other piece. So an error of a codec is found too.

// divide returns a slot in two parts: the front for stored extents, and the end for page bytes.
func (e *Engine) divide(m Memory, slot []byte) (stored, pages []byte) {
	at := (len(slot) - min(int(e.memoryPart(m)), len(slot)/2)) &^ (pieceformat.Page - 1)
	return slot[:at], slot[at:]
}

// fitting returns the end of the longest run of extents from lo, at most to hi, whose page bytes fit a part of a slot,
// and the payload offset of the part's first byte.
func fitting(extents []kv.Extent, lo, hi int, part []byte) (mid int, base int64) {
	mid, base = lo, extents[lo].Off&^(pieceformat.Page-1)
	for mid < hi && end(extents[mid])-base <= int64(len(part)) {
		mid++
	}
	return mid, base
}

// compressedWriter writes a file of compressed extents: whole pages as they are filled, the head last.
type compressedWriter struct {
	*pieceWriter
	buf    []byte
	start  int   // buf[start:filled] is to be written
	filled int   // if the head has room before it, one call writes both
	at     int64 // offset of buf[start] in the file
	stored []pieceformat.Stored
	took   time.Duration // time of the codec
}

// compressed stores the piece, and returns the size of its file.
func (w *pieceWriter) compressed(slot []byte, stored []pieceformat.Stored) (int64, error) {
	put, e := w.task.chunk.Put, w.task.queue.engine
	extents, head := w.plan.Extents(), put.DataOffset()
	c := &compressedWriter{pieceWriter: w, at: head, stored: stored}
	c.buf = e.ioBuffer(w.task.memory, slot, w.file, head)
	if head <= int64(len(c.buf))/4 {
		c.start = int(head)
	}
	c.filled = c.start
	for lo := 0; lo < len(extents); {
		hi, err := c.byGPU(lo)
		if err == nil && hi == lo {
			hi, err = c.byProcessor(slot, lo)
		}
		if err != nil {
			return 0, err
		}
		lo = hi
	}
	size, err := c.end(slot, stored)
	if err == nil {
		put.Encoded(pieceformat.StoredBytes(stored), c.took)
	}
	return size, err
}

// byProcessor gathers extents from lo on into the end of the slot and encodes them into its front, up to hi.
func (c *compressedWriter) byProcessor(slot []byte, lo int) (hi int, err error) {
	front, pages := c.task.queue.engine.divide(c.task.memory, slot)
	if c.filled > len(front) {
		if err := c.flush(); err != nil {
			return lo, err
		}
	}
	c.buf = c.buf[:min(len(c.buf), len(front))]
	extents, element := c.plan.Extents(), c.task.chunk.Put.Element()
	hi, base := fitting(extents, lo, len(extents), pages)
	if err := c.gatherTo(pages, lo, hi, base); err != nil {
		return lo, err
	}
	for x := lo; x < hi; x++ {
		n := int(extents[x].Len)
		if c.filled+n > len(c.buf) {
			if err := c.flush(); err != nil {
				return lo, err
			}
		}
		began := time.Now()
		c.stored[x] = pieceformat.EncodeExtent(c.buf[c.filled:c.filled+n], pages[extents[x].Off-base:][:n], element, c.table[x])
		c.took += time.Since(began)
		c.filled += int(c.stored[x].Len)
	}
	return hi, nil
}

// flush writes whole pages, and moves the rest to the front.
func (c *compressedWriter) flush() error {
	n := (c.filled - c.start) &^ (pieceformat.Page - 1)
	if n > 0 {
		if _, err := c.file.WriteAt(c.buf[c.start:c.start+n], c.at); err != nil {
			return err
		}
	}
	c.at += int64(n)
	c.filled = copy(c.buf, c.buf[c.start+n:c.filled])
	c.start = 0
	return nil
}

// end writes the last pages and then the head, by one call if nothing was written before.
func (c *compressedWriter) end(slot []byte, stored []pieceformat.Stored) (size int64, err error) {
	put := c.task.chunk.Put
	head := put.DataOffset()
	last := int(pieceformat.Padded(int64(c.filled)))
	clear(c.buf[c.filled:last])
	if int64(c.start) == head {
		size = put.HeadStored(c.buf[:head], c.table, stored)
		_, err = c.file.WriteAt(c.buf[:last], 0)
		return size, err
	}
	if _, err := c.file.WriteAt(c.buf[:last], c.at); err != nil {
		return 0, err
	}
	size = put.HeadStored(slot[:head], c.table, stored)
	_, err = c.file.WriteAt(slot[:head], 0)
	return size, err
}

// divide reserves the end of the slot for page bytes if the processor decodes. A GPU decodes from the whole slot.
func (r *pieceReader) divide(processor bool) {
	if processor {
		var front []byte
		front, r.pages = r.engine.divide(r.memory, r.slot)
		r.buf = r.buf[:min(len(r.buf), len(front))]
	}
}

// scatterCompressed decodes and delivers extents [lo, hi), the stored bytes of which begin in buf at base. Extents that
// the GPU does not decode are read again for the processor. If the GPU finds wrong bytes, the processor finds out
// whether the file has them.
func (r *pieceReader) scatterCompressed(head *store.Head, lo, hi int, base int64) error {
	if r.pages != nil {
		return r.byProcessor(head, lo, hi, base)
	}
	for lo < hi {
		mid, done, doubt, err := r.byGPU(head, lo, hi, image{host: r.buf}, base)
		if err == nil && !done {
			mid, err = hi, r.again(head, lo, hi, doubt)
		}
		if err != nil {
			return err
		}
		lo = mid
	}
	return nil
}

// again reads extents [lo, hi) into a part of the slot and delivers them by the processor. If that succeeds, the wrong
// bytes were the GPU's.
func (r *pieceReader) again(head *store.Head, lo, hi int, doubt error) error {
	buf := r.buf
	defer func() { r.buf, r.pages = buf, nil }()
	r.divide(true)
	last, err := r.readRun(head, lo, hi)
	if err == nil {
		err = last()
	}
	if err == nil && doubt != nil {
		r.memory.(*DeviceMemory).gpu.CoderFailed(doubt)
	}
	return err
}

// byProcessor decodes and delivers extents through the end of the slot.
func (r *pieceReader) byProcessor(head *store.Head, lo, hi int, base int64) error {
	extents := head.Plan.Extents()
	for lo < hi {
		mid, from := fitting(extents, lo, hi, r.pages)
		var pages, stored int64
		began := time.Now()
		for x := lo; x < mid; x++ {
			if err := r.decode(r.pages[extents[x].Off-from:][:extents[x].Len], head, x, base); err != nil {
				return fmt.Errorf("%w: extent %d of %s: %w", ErrDamaged, x, r.piece.File().Name(), err)
			}
			pages, stored = pages+int64(extents[x].Len), stored+int64(head.Stored[x].Len)
		}
		r.piece.Decoded(pages, stored, time.Since(began))
		if err := r.scatterFrom(r.pages, head, lo, mid, from); err != nil {
			return err
		}
		lo = mid
	}
	return nil
}

// decode writes the page bytes of an extent to dst. An extent that is stored plain is verified at its delivery, since
// both its checksums are the same.
func (r *pieceReader) decode(dst []byte, head *store.Head, x int, base int64) error {
	by := codec.Codec(head.Stored[x].Codec)
	if by != codec.Raw {
		if err := head.Verify(x, x+1, r.buf, head.DataOffset+base); err != nil {
			return err
		}
	}
	return codec.Decode(dst, r.buf[head.Offsets[x]-base:head.Offsets[x+1]-base], by)
}
