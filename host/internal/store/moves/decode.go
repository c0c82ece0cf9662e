package moves

import (
	"fmt"
	"time"

	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
)

// decoder writes a compressed piece as one of version 1.
type decoder struct {
	src   Source
	head  *Head
	to    Target
	data  int64  // where the payload starts in the target
	pages []byte // whole pages and one extent, from base on in the payload
	base  int64
	have  int64 // payload bytes that are decoded, gaps included
}

// decoder writes the head of the copy.
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

// extents decodes some: data holds the source from base on. Their stored bytes are verified.
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

// fill writes zeros up to a byte of the payload.
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
