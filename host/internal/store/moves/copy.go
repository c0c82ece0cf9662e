package moves

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"time"

	"github.com/kvhost/kvhost/host/internal/codec"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
)

// Source is a piece that is open for reading.
type Source interface {
	io.ReaderAt
	Size() int64
	// Verify checks the piece by its first bytes and returns its layout, the offset of the payload, and the checksums.
	Verify(head []byte) (*Head, error)
	// Decoded records the bytes that were decompressed and the time of the codec.
	Decoded(pages, stored int64, took time.Duration)
	// Cancelled reports whether the copy is no longer wanted.
	Cancelled() bool
}

// Head is the information before the payload that a reader needs.
type Head struct {
	Plan       *kv.Plan
	DataOffset int64
	Table      []uint64 // checksums of the plan's extents; nil until the table has been read
	// Stored describes how the extents of a version 2 piece are stored. Offsets holds the start of each extent, relative to the
	// payload, and the end of the last one. Both are nil for version 1, and until the table has been read.
	Stored  []pieceformat.Stored
	Offsets []int64
	// Compressed means that the piece is of version 2.
	Compressed bool
}

// Read fills in the head from a piece's header. b begins with the header. If it holds the whole table, Read reads the table as
// well.
func (d *Head) Read(h *pieceformat.Header, plan *kv.Plan, b []byte) (err error) {
	d.Plan, d.DataOffset, d.Compressed = plan, h.DataOffset, h.Version() == pieceformat.CompressedVersion
	if int64(len(b)) < h.DataOffset {
		return nil
	}
	b = b[pieceformat.Page:]
	if !d.Compressed {
		d.Table, err = h.ReadTable(b, d.Table)
		return err
	}
	if d.Table, d.Stored, err = h.ReadStored(b, plan.Extents(), d.Table, d.Stored); err == nil {
		d.Offsets = pieceformat.Offsets(d.Stored, d.Offsets)
	}
	return err
}

// At returns the start and the end of an extent in the file.
func (d *Head) At(extent int) (from, to int64) {
	if d.Compressed {
		return d.DataOffset + d.Offsets[extent], d.DataOffset + d.Offsets[extent+1]
	}
	e := &d.Plan.Extents()[extent]
	return d.DataOffset + e.Off, d.DataOffset + e.Off + int64(e.Len)
}

// Verify checks stored extents against the table. data holds the file from offset base on.
func (d *Head) Verify(lo, hi int, data []byte, base int64) error {
	if !d.Compressed {
		return kv.VerifyExtents(d.Plan, lo, hi, data, base-d.DataOffset, d.Table)
	}
	for i := lo; i < hi; i++ {
		from, to := d.At(i)
		if got := kv.Sum(data[from-base : to-base]); got != d.Stored[i].Sum {
			return fmt.Errorf("%w: stored extent %d at payload byte %d: %016x, the table says %016x", kv.ErrChecksum, i,
				d.Offsets[i], got, d.Stored[i].Sum)
		}
	}
	return nil
}

// Decode decompresses an extent to page, which has the length of the extent. stored is the stored extent, which must have been
// verified.
func (d *Head) Decode(extent int, page, stored []byte) error {
	if err := codec.Decode(page, stored, codec.Codec(d.Stored[extent].Codec)); err != nil {
		return fmt.Errorf("%w: extent %d: %w", pieceformat.ErrDamaged, extent, err)
	}
	if got := kv.Sum(page); got != d.Table[extent] {
		return fmt.Errorf("%w: extent %d is decoded to %016x, the table says %016x", kv.ErrChecksum, extent, got,
			d.Table[extent])
	}
	return nil
}

// Target receives a piece: all bytes once, in order and in whole pages. The exception is the head of a piece that is compressed
// during the copy, which comes last. Nothing is visible before Commit.
type Target interface {
	io.WriterAt
	// Decodes reports whether a compressed piece must be written as version 1.
	Decodes() bool
	// Compresses reports whether a piece of version 1 must be written as version 2. Element is then the size of its numbers in
	// bytes. HeadStored writes the head and returns the size of the file, and Encoded records the gain.
	Compresses() bool
	Element() int
	// Name returns the piece's name for the header.
	Name() string
	HeadStored(dst []byte, table []uint64, stored []pieceformat.Stored) int64
	Encoded(stored int64, took time.Duration)
	Commit(ctx context.Context) error
	Abort(cause error)
}

// recoder writes a piece in another version than its source.
type recoder interface {
	// extents writes some extents. data holds the source from offset base on. The extents must have been verified in their
	// stored form.
	extents(lo, hi int, data []byte, base int64) error
	// end writes the rest.
	end() error
}

// recoder returns nil if the file is copied unchanged.
func (c *Copier) recoder(src Source, h *pieceformat.Header, head *Head, to Target) (recoder, error) {
	switch {
	case head.Compressed && to.Decodes():
		return c.decoder(src, h, head, to)
	case !head.Compressed && to.Compresses():
		return c.encoder(head, to), nil
	}
	return nil, nil
}

// Begin creates the target of a piece, given the piece's header.
type Begin func(ctx context.Context, h *pieceformat.Header) (Target, error)

// Copier belongs to a worker. It holds the worker's buffers and the budget that all workers share.
type Copier struct {
	buf    []byte // partBytes, with room for the rest of an extent from the part before
	pages  []byte // of the same size; nil until a piece is written in another version
	budget *budget
	clear  int   // bytes that may be copied before the next wait for loads
	copied int64 // bytes copied by the running move
}

const (
	// partBytes is the size of a part in bytes.
	partBytes = 256 << 10
	// carried is the maximum number of bytes of a part that are verified together with the next part: an extent, and the bytes
	// before it in its first page.
	carried     = kv.ExtentBytes + pieceformat.Page
	bufferBytes = partBytes + carried
)

// recoded returns the buffer for a piece that is written in another version.
func (c *Copier) recoded() []byte {
	if c.pages == nil {
		c.pages = make([]byte, bufferBytes)
	}
	return c.pages
}

// take waits until n bytes may be copied. Several small pieces wait for loads once, as a part of a large piece does.
func (c *Copier) take(ctx context.Context, n int) error {
	if c.clear < n {
		if err := c.budget.yield(ctx); err != nil {
			return err
		}
		c.clear = partBytes
	}
	c.clear -= n
	return c.budget.take(ctx, n)
}

// Copy copies a piece. It calls begin only if the head of the source is valid, and commits the target only if all bytes are.
func (c *Copier) Copy(ctx context.Context, src Source, begin Begin) (copied int64, err error) {
	var to Target
	defer func() {
		if err != nil && to != nil {
			to.Abort(err)
		}
	}()
	size := src.Size()
	if size < pieceformat.Page || size%pieceformat.Page != 0 {
		return 0, fmt.Errorf("%w: a file of %d bytes", pieceformat.ErrDamaged, size)
	}
	var head *Head
	var out recoder
	next := 0               // first extent that is not verified
	kept, at := 0, int64(0) // buf[:kept] holds the bytes before at
	for at < size {
		n := int(min(partBytes, size-at))
		if err := c.take(ctx, n); err != nil {
			return at, err
		}
		if src.Cancelled() {
			return at, ErrCancelled
		}
		part := c.buf[kept : kept+n]
		if got, err := src.ReadAt(part, at); got < n {
			return at, fmt.Errorf("store: reading %d bytes at %d: %w", n, at, cmp.Or(err, io.ErrUnexpectedEOF))
		}
		if at == 0 {
			h, err := pieceformat.DecodeHeader(part)
			if err != nil {
				return 0, err
			}
			if head, err = src.Verify(part); err != nil {
				return 0, err
			}
			if head.Table == nil {
				return 0, fmt.Errorf("%w: %d, its payload begins at %d", ErrTable, h.Extents, head.DataOffset)
			}
			if to, err = begin(ctx, &h); err != nil {
				return 0, err
			}
			if name := to.Name(); h.Name != name {
				h.Name = name
				h.Encode(part)
			}
			if out, err = c.recoder(src, &h, head, to); err != nil {
				return 0, err
			}
		}
		have := at + int64(n)
		from := at - int64(kept) // offset of buf in the file
		last, extents := next, len(head.Plan.Extents())
		for ; last < extents; last++ {
			if _, end := head.At(last); end > have {
				break
			}
		}
		if err := head.Verify(next, last, c.buf[:kept+n], from); err != nil {
			return at, err
		}
		if out != nil {
			err = out.extents(next, last, c.buf[:kept+n], from)
		} else {
			_, err = to.WriteAt(part, at)
		}
		if err != nil {
			return at, fmt.Errorf("store: writing %d bytes at %d: %w", n, at, err)
		}
		at, kept, next = have, 0, last
		c.copied += int64(n)
		if next < extents {
			start, _ := head.At(next)
			if rest := start &^ (pieceformat.Page - 1); rest < at {
				kept = int(at - rest)
				copy(c.buf, c.buf[int(rest-from):int(at-from)])
			}
		}
	}
	if out != nil {
		if err := out.end(); err != nil {
			return at, fmt.Errorf("store: writing the last pages: %w", err)
		}
	}
	if src.Cancelled() {
		return at, ErrCancelled
	}
	return at, to.Commit(ctx)
}
