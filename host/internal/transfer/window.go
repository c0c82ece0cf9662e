package transfer

import (
	"errors"
	"fmt"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/kv"
)

// On the way between a slot and a GPU's pages, bytes pass through device memory, the window of the thread that
// copies:
//
//	load:   slot --copy engine--> window --checksums, compared--> --scatter--> pages
//	store:  pages --gather--> window --checksums--> --copy engine--> slot
//
// The GPU computes the checksums from the bytes that crossed the bus, and the CPU compares them before any byte reaches
// a page. A range that does not fit a window, or any range while windows do not work, goes without one: a kernel copies
// between slot and pages, and the CPU computes the checksums from the slot.

// part is a range of extents and the buffer that they are in.
type part struct {
	r      ExtentRange
	src    []byte
	base   int64 // payload offset of the first byte of the window that the part is in
	reader *pieceReader
	err    error
}

// window returns the place of a part's extents in its buffer.
func (p *part) window() (from, to int64) {
	extents := p.r.extents()
	return extents[0].Off - p.r.Base, end(extents[len(extents)-1]) - p.r.Base
}

// aligned rounds the offset of a window up to the place of the next part.
func aligned(n int64) int64 { return (n + 255) &^ 255 }

// windowTries is the number of uploads of bytes that are right in the slot. An error of the bus may not occur again,
// and only a window can detect it.
const windowTries = 2

// Gather copies pages to dst, which is fast when dst is registered with the GPU. The GPU computes the checksums in a
// window on the way; without a window the CPU computes them from dst.
func (m *DeviceMemory) Gather(r ExtentRange, dst []byte) error {
	if done, err := m.gatherWindow(&r, dst); done {
		return err
	}
	if err := m.move(m.hostBatch(gds.Gather, dst), &r); err != nil {
		return err
	}
	r.sum(dst)
	return nil
}

// Scatter verifies all of src, in a window of the GPU or else by the CPU, before any of it reaches a page.
func (m *DeviceMemory) Scatter(r ExtentRange, src []byte) error {
	verified := false
	for range windowTries {
		done, mismatch, err := m.scatterWindow([]part{{r: r, src: src}})
		if done {
			return err
		}
		if mismatch == nil {
			break
		}
		if err := r.verify(src); err != nil {
			return err
		}
		verified = true
		m.gpu.WindowFailed(mismatch) // the slot's bytes are right, the window's were not
	}
	if !verified {
		if err := r.verify(src); err != nil {
			return err
		}
	}
	return m.move(m.hostBatch(gds.Scatter, src), &r)
}

// scatterParts is Scatter for several parts, which get the errors.
func (m *DeviceMemory) scatterParts(parts []part) {
	if len(parts) > 1 {
		if done, _, err := m.scatterWindow(parts); done {
			for i := range parts {
				parts[i].err = err
			}
			return
		}
	}
	for i := range parts {
		parts[i].err = m.Scatter(parts[i].r, parts[i].src)
	}
}

// scatterWindow is Scatter of all parts through one window. When done, err is the result. Otherwise no byte reached a
// page, and mismatch is the wrong checksum, if that is the reason.
func (m *DeviceMemory) scatterWindow(parts []part) (done bool, mismatch, err error) {
	bytes, n := int64(0), 0
	for i := range parts {
		p := &parts[i]
		from, to := p.window()
		bytes, n = aligned(bytes)+to-from, n+p.r.Hi-p.r.Lo
	}
	if !m.gpu.FitsWindow(bytes, n) {
		return false, nil, nil
	}
	lost := m.gpu.Do(func(t *gds.Thread) {
		w := t.Window()
		b := w.Begin(gds.Scatter, m.flag)
		if err = m.upload(w, &b, parts, n); err == nil {
			err = b.Wait()
		}
		if err != nil {
			err = errors.Join(err, w.Sync())
			return
		}
		done = true
		if x := w.Differs(n); x >= 0 { // and nothing was scattered
			done = false
			mismatch = fmt.Errorf("%w: extent %d of a window of %d has sum %016x, the table says %016x",
				kv.ErrChecksum, x, n, w.Sums[x], w.Expected[x])
		}
	})
	if done {
		m.gpu.WindowSucceeded()
	}
	if lost == nil && (done || mismatch != nil) {
		return done, mismatch, nil
	}
	done, err = m.windowFailed(lost, err)
	return done, nil, err
}

// upload starts to copy the parts to a window and to sum their n extents there, and adds their pages to the batch.
func (m *DeviceMemory) upload(w *gds.Window, b *gds.Batch, parts []part, n int) error {
	at, extents := int64(0), 0
	for i := range parts {
		p := &parts[i]
		from, to := p.window()
		p.base = p.r.extents()[0].Off - at
		copy(w.Expected[extents:], p.r.Table[p.r.Lo:p.r.Hi])
		extents += place(w.Extents[extents:], p.r.extents(), p.base)
		sums := 0
		if i == len(parts)-1 {
			sums = n
		}
		if err := w.Upload(b, p.src[from:to], int(at), sums); err != nil {
			return err
		}
		at = aligned(at + to - from)
	}
	for i := range parts {
		r := parts[i].r
		r.Base = parts[i].base
		if err := m.add(b, &r); err != nil {
			return err
		}
	}
	return nil
}

// gatherWindow is Gather through a window. When done, err is the result.
func (m *DeviceMemory) gatherWindow(r *ExtentRange, dst []byte) (done bool, err error) {
	extents := r.extents()
	if !m.fitsWindow(extents, r.Base) {
		return false, nil
	}
	lost := m.gpu.Do(func(t *gds.Thread) {
		w := t.Window()
		n := place(w.Extents, extents, r.Base)
		b := w.Begin(gds.Gather, m.flag)
		if err = m.add(&b, r); err != nil {
			return
		}
		if err = w.Collect(&b, n, dst); err == nil {
			copy(r.Table[r.Lo:r.Hi], w.Sums)
		}
	})
	if lost == nil && err == nil {
		m.gpu.WindowSucceeded()
		return true, nil
	}
	return m.windowFailed(lost, err)
}

func (m *DeviceMemory) fitsWindow(extents []kv.Extent, base int64) bool {
	return len(extents) > 0 && m.gpu.FitsWindow(end(extents[len(extents)-1])-base, len(extents))
}

// place writes the places of the extents into a window's table, and returns their number.
func place(table []gds.Extent, extents []kv.Extent, base int64) int {
	for i, e := range extents {
		table[i] = gds.Extent{Offset: uint64(e.Off - base), Len: uint32(e.Len)}
	}
	return len(extents)
}

// windowFailed decides about extents that failed in a window: they are copied without one, unless the GPU is lost or
// the job was cancelled.
func (m *DeviceMemory) windowFailed(lost, err error) (done bool, _ error) {
	return m.failed(lost, err, m.gpu.WindowFailed)
}

// failed passes the error of a part of the GPU to that part's report, so that the work can go on without it. If the GPU is lost or
// the job was cancelled, nothing can go on: done is then true, with the error of the task.
func (m *DeviceMemory) failed(lost, err error, report func(error)) (done bool, _ error) {
	if lost = errors.Join(lost, m.gpu.Err()); lost != nil || errors.Is(err, gds.ErrStopped) {
		return true, deviceError(errors.Join(lost, err))
	}
	report(err)
	return false, nil
}
