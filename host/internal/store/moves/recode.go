package moves

import (
	"fmt"
	"time"

	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
)

// encoder writes a piece of version 1 as version 2: first its extents, and then the head.
type encoder struct {
	head   *Head
	to     Target
	stored []pieceformat.Stored
	buf    []byte // buf[:filled] is encoded and will be written at offset at of the target
	filled int
	at     int64
	took   time.Duration // time in the codec
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
		stored := pieceformat.EncodeExtent(e.buf[e.filled:][:len(page)], page, element, e.head.Table[i])
		e.took += time.Since(began)
		e.stored = append(e.stored, stored)
		e.filled += int(stored.Len)
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

// decoder writes a compressed piece as version 1.
type decoder struct {
	src   Source
	head  *Head
	to    Target
	data  int64  // offset of the payload in the target
	pages []byte // whole pages and one extent; holds the payload from base on
	base  int64
	have  int64 // payload bytes that are decoded, including gaps
}

// decoder returns a decoder after writing the head of the copy.
func (c *Copier) decoder(src Source, h *pieceformat.Header, head *Head, to Target) (*decoder, error) {
	v1 := *h
	v1.Stored, v1.DataOffset = 0, pieceformat.DataOffset(len(head.Table), false)
	page := make([]byte, v1.DataOffset)
	v1.TableSum = pieceformat.PutTable(page[pieceformat.Page:], head.Table)
	v1.Encode(page)
	if _, err := to.WriteAt(page, 0); err != nil {
		return nil, fmt.Errorf("store: writing the head: %w", err)
	}
	return &decoder{src: src, head: head, to: to, data: v1.DataOffset, pages: c.recoded()}, nil
}

// extents decodes some extents. data holds the source from offset base on. The stored bytes must have been verified.
func (d *decoder) extents(lo, hi int, data []byte, base int64) error {
	var pages, stored int64
	var took time.Duration
	for i := lo; i < hi; i++ {
		e := d.head.Plan.Extents()[i]
		if err := d.fill(e.Off); err != nil {
			return err
		}
		if d.have-d.base+int64(e.Len) > int64(len(d.pages)) {
			if err := d.flush(); err != nil {
				return err
			}
		}
		from, to := d.head.At(i)
		began := time.Now()
		if err := d.head.Decode(i, d.pages[d.have-d.base:][:e.Len], data[from-base:to-base]); err != nil {
			return err
		}
		took += time.Since(began)
		pages, stored = pages+int64(e.Len), stored+to-from
		d.have += int64(e.Len)
	}
	d.src.Decoded(pages, stored, took)
	return nil
}

// fill writes zeros up to an offset of the payload.
func (d *decoder) fill(upTo int64) error {
	for d.have < upTo {
		n := min(upTo, d.base+int64(len(d.pages))) - d.have
		clear(d.pages[d.have-d.base:][:n])
		if d.have += n; d.have < upTo {
			if err := d.flush(); err != nil {
				return err
			}
		}
	}
	return nil
}

// flush writes the whole pages that are decoded.
func (d *decoder) flush() error {
	n := (d.have - d.base) &^ (pieceformat.Page - 1)
	if _, err := d.to.WriteAt(d.pages[:n], d.data+d.base); err != nil {
		return err
	}
	copy(d.pages, d.pages[n:d.have-d.base])
	d.base += n
	return nil
}

// end writes the rest. A plan ends with its last extent.
func (d *decoder) end() error {
	if err := d.fill(pieceformat.Padded(d.head.Plan.PayloadBytes())); err != nil {
		return err
	}
	return d.flush()
}
