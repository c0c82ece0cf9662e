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
		done, mismatch, err := m.scatterWindow(&r, src)
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

// scatterWindow is Scatter through a window. When done, err is the result. Otherwise no byte reached a page, and
// mismatch is the wrong checksum, if that is the reason.
func (m *DeviceMemory) scatterWindow(r *ExtentRange, src []byte) (done bool, mismatch, err error) {
	extents := r.extents()
	if !m.fitsWindow(extents, r.Base) {
		return false, nil, nil
	}
	from, to := extents[0].Off-r.Base, end(extents[len(extents)-1])-r.Base
	lost := m.gpu.Do(func(t *gds.Thread) {
		w := t.Window()
		n := place(w, extents, r.Base)
		copy(w.Expected, r.Table[r.Lo:r.Hi])
		b := w.Begin(gds.Scatter, m.flag)
		if err = w.Upload(&b, src[from:to], int(from), n); err == nil {
			err = m.add(&b, r)
		}
		if err == nil {
			err = b.Wait()
		}
		if err != nil {
			err = errors.Join(err, w.Sync())
			return
		}
		done = true
		if x := w.Differs(n); x >= 0 { // and nothing was scattered
			done = false
			mismatch = fmt.Errorf("%w: extent %d has sum %016x in a window, the table says %016x",
				kv.ErrChecksum, r.Lo+x, w.Sums[x], w.Expected[x])
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

// gatherWindow is Gather through a window. When done, err is the result.
func (m *DeviceMemory) gatherWindow(r *ExtentRange, dst []byte) (done bool, err error) {
	extents := r.extents()
	if !m.fitsWindow(extents, r.Base) {
		return false, nil
	}
	lost := m.gpu.Do(func(t *gds.Thread) {
		w := t.Window()
		n := place(w, extents, r.Base)
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
func place(w *gds.Window, extents []kv.Extent, base int64) int {
	for i, e := range extents {
		w.Extents[i] = gds.Extent{Offset: uint64(e.Off - base), Len: uint32(e.Len)}
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
