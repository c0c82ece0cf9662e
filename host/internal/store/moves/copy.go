package moves

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/kvhost/kvhost/host/internal/codec"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
)

// Source is a piece that is there, open for reading.
type Source interface {
	io.ReaderAt
	Size() int64
	// Verify judges the piece by its first bytes: its layout, where the payload begins, and the checksums.
	Verify(head []byte) (*Head, error)
	// Decoded enters what was decompressed of it, and the time of the codec.
	Decoded(pages, stored int64, took time.Duration)
	// Cancelled says that the copy is not wanted any more.
	Cancelled() bool
}

// Head is what a reader needs to know of a piece before its payload.
type Head struct {
	Plan       *kv.Plan
	DataOffset int64
	Table      []uint64 // checksums of the plan's extents; nil until the table's bytes were given
	// Of a piece of version 2 how its extents are stored, and where each begins and the last one ends, from the payload's
	// start. Nil for version 1, and until the table's bytes were given.
	Stored  []pieceformat.Stored
	Offsets []int64
	// Compressed says that the piece is of version 2.
	Compressed bool
}

// Read takes what a piece's header says, and its table where b, which begins with the header, has all of it.
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

// At is where an extent begins in the file, and where it ends.
func (d *Head) At(extent int) (from, to int64) {
	if d.Compressed {
		return d.DataOffset + d.Offsets[extent], d.DataOffset + d.Offsets[extent+1]
	}
	e := &d.Plan.Extents()[extent]
	return d.DataOffset + e.Off, d.DataOffset + e.Off + int64(e.Len)
}

// Verify checks extents against the table, as they are stored in the file: data holds it from base on.
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

// Decode writes an extent's page bytes to page, which is as long as the extent. stored is the extent as it is stored in the
// file, and verified.
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

// Target takes a piece: its bytes in order, each once, in whole pages, but for the head of one that is compressed on the way,
// which comes last. Nothing shows before Commit.
type Target interface {
	io.WriterAt
	// Decodes says that the target is to get a compressed piece as version 1: it must not hold others.
	Decodes() bool
	// Compresses says that the target is to get a piece of version 1 as version 2, of numbers of Element bytes. HeadStored
	// then writes the head and returns the size of the file, and Encoded enters what it gained.
	Compresses() bool
	Element() int
	// Name is what the header is to have as the piece's name.
	Name() string
	HeadStored(dst []byte, table []uint64, stored []pieceformat.Stored) int64
	Encoded(stored int64, took time.Duration)
	Commit(ctx context.Context) error
	Abort(cause error)
}

// recoder writes a piece in another version than it has.
type recoder interface {
	// extents writes some: data holds the source from base on. They are verified as they stand there.
	extents(lo, hi int, data []byte, base int64) error
	// end writes the rest.
	end() error
}

// recoder is nil when the copy is the file as it is.
func (c *Copier) recoder(src Source, h *pieceformat.Header, head *Head, to Target) (recoder, error) {
	switch {
	case head.Compressed && to.Decodes():
		return c.decoder(src, h, head, to)
	case !head.Compressed && to.Compresses():
		return c.encoder(head, to), nil
	}
	return nil, nil
}

// Begin makes the target of a piece, given the piece's header.
type Begin func(ctx context.Context, h *pieceformat.Header) (Target, error)

// Copier is a worker's: a buffer, and the budget that all workers share.
type Copier struct {
	buf    []byte // PartBytes, and room for what a part leaves of an extent
	pages  []byte // as long; nil until a piece was written in another version
	budget *budget
	clear  int   // bytes that may be copied before it looks for loads again
	copied int64 // bytes of the move that runs
}

const (
	// partBytes is how much is copied at a time.
	partBytes = 256 << 10
	// Most bytes of a part that are verified with the next one: those of an extent, and up to the page before it.
	carried     = kv.ExtentBytes + pieceformat.Page
	bufferBytes = partBytes + carried
)

// recoded is the buffer for what is written in another version.
func (c *Copier) recoded() []byte {
	if c.pages == nil {
		c.pages = make([]byte, bufferBytes)
	}
	return c.pages
}

// take waits until so many bytes may be copied. Small pieces wait for loads together, as the parts of a large one would.
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

// Copy copies a piece. Target is not called when there is something wrong with the source's head, and not committed
// when there is something wrong with the rest.
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
	next := 0               // the first extent that is not verified
	kept, at := 0, int64(0) // buf[:kept] is what was read before at
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
			return at, fmt.Errorf("store: reading %d bytes at %d: %w", n, at, errOr(err, io.ErrUnexpectedEOF))
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
		from := at - int64(kept) // where buf begins in the file
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

func errOr(err, otherwise error) error {
	if err != nil {
		return err
	}
	return otherwise
}
