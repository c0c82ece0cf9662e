package moves

import (
	"time"

	"github.com/kvhost/kvhost/host/internal/codec"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
)

// encoder writes a piece of version 1 as one of version 2: its extents, and then the head.
type encoder struct {
	head   *Head
	to     Target
	stored []pieceformat.Stored
	buf    []byte // buf[:filled] is encoded, and goes to at in the target
	filled int
	at     int64
	took   time.Duration // by the codec
}

func (c *Copier) encoder(head *Head, to Target) *encoder {
	return &encoder{head: head, to: to, stored: make([]pieceformat.Stored, 0, len(head.Table)), buf: c.recoded(),
		at: pieceformat.DataOffset(len(head.Table), true)}
}

func (e *encoder) extents(lo, hi int, data []byte, base int64) error {
	element := e.to.Element()
	for i := lo; i < hi; i++ {
		from, to := e.head.At(i)
		page := data[from-base : to-base]
		if e.filled+len(page) > len(e.buf) {
			if err := e.flush(); err != nil {
				return err
			}
		}
		began := time.Now()
		dst, sum := e.buf[e.filled:][:len(page)], e.head.Table[i]
		n, by := codec.Encode(dst, page, element)
		if by != codec.Raw {
			sum = kv.Sum(dst[:n])
		}
		e.took += time.Since(began)
		e.stored = append(e.stored, pieceformat.Stored{Sum: sum, Len: uint32(n), Codec: uint8(by)})
		e.filled += n
	}
	return nil
}

// flush writes the whole pages that are encoded.
func (e *encoder) flush() error {
	n := e.filled &^ (pieceformat.Page - 1)
	if _, err := e.to.WriteAt(e.buf[:n], e.at); err != nil {
		return err
	}
	e.at += int64(n)
	e.filled = copy(e.buf, e.buf[n:e.filled])
	return nil
}

func (e *encoder) end() error {
	last := int(pieceformat.Padded(int64(e.filled)))
	clear(e.buf[e.filled:last])
	if _, err := e.to.WriteAt(e.buf[:last], e.at); err != nil {
		return err
	}
	page := make([]byte, pieceformat.DataOffset(len(e.head.Table), true))
	e.to.HeadStored(page, e.head.Table, e.stored)
	if _, err := e.to.WriteAt(page, 0); err != nil {
		return err
	}
	e.to.Encoded(pieceformat.StoredBytes(e.stored), e.took)
	return nil
}
