package transfer

import (
	"errors"
	"fmt"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/chunk"
)

// Between a slot and a GPU's pages bytes stand for a moment in device memory, in the window of the thread that copies:
//
//	load:   slot --copy engine--> window --checksums, compared--> --scatter--> pages
//	store:  pages --gather--> window --checksums--> --copy engine--> slot
//
// The checksums are made on the GPU, of the bytes that have crossed the bus, and compared by the processor before any of them
// reaches a page. What finds no window, because it is too large or windows do not work, goes without: a kernel copies
// between slot and pages, and the processor makes the checksums of the slot.

// windowTries is how often bytes that are right in the slot are sent to a window: what changed on the bus may arrive the second
// time, and only what arrives in a window is known to have arrived.
const windowTries = 2

// scatterWindow is scatter by way of a window. It says whether the fate of the extents is decided; else nothing reached a
// page, and suspect says what was wrong with the bytes in the window, if that is why.
func (m *DeviceMemory) scatterWindow(flag *gds.Flag, p *chunk.Plan, lo, hi int, ids []uint32, src []byte, base int64, table []uint64) (done bool, suspect, err error) {
	extents := p.Extents()[lo:hi]
	if !m.fitsWindow(extents, base) {
		return false, nil, nil
	}
	if err := m.check(ids); err != nil {
		return true, nil, err
	}
	from, to := extents[0].Off-base, end(extents[len(extents)-1])-base
	lost := m.gpu.Do(func(t *gds.Thread) {
		w, n := t.Window(), 0
		if table != nil {
			n = place(w, extents, base)
			copy(w.Expected, table[lo:hi])
		}
		b := w.Begin(gds.Scatter, flag)
		if err = w.Upload(&b, src[from:to], int(from), n); err == nil {
			err = m.add(&b, p, lo, hi, ids, base)
		}
		if err == nil {
			err = b.Wait()
		}
		if err != nil {
			err = errors.Join(err, w.Sync())
			return
		}
		done = true
		if x := w.Differs(n); x >= 0 { // and nothing has moved
			done = false
			suspect = fmt.Errorf("%w: extent %d is summed as %016x in a window, the table says %016x", chunk.ErrChecksum, lo+x, w.Sums[x], w.Expected[x])
		}
	})
	if done {
		m.gpu.WindowSucceeded()
	}
	if lost == nil && (done || suspect != nil) {
		return done, suspect, nil
	}
	done, err = m.leaveWindow(lost, err)
	return done, nil, err
}

// gatherWindow is gather by way of a window. It says whether the fate of the extents is decided.
func (m *DeviceMemory) gatherWindow(flag *gds.Flag, p *chunk.Plan, lo, hi int, ids []uint32, dst []byte, base int64, table []uint64) (done bool, err error) {
	extents := p.Extents()[lo:hi]
	if !m.fitsWindow(extents, base) {
		return false, nil
	}
	if err := m.check(ids); err != nil {
		return true, err
	}
	lost := m.gpu.Do(func(t *gds.Thread) {
		w := t.Window()
		n := place(w, extents, base)
		b := w.Begin(gds.Gather, flag)
		if err = m.add(&b, p, lo, hi, ids, base); err != nil {
			return
		}
		if err = w.Collect(&b, n, dst); err == nil {
			copy(table[lo:hi], w.Sums)
		}
	})
	if lost == nil && err == nil {
		m.gpu.WindowSucceeded()
		return true, nil
	}
	return m.leaveWindow(lost, err)
}

func (m *DeviceMemory) fitsWindow(extents []chunk.Extent, base int64) bool {
	return len(extents) > 0 && m.gpu.FitsWindow(end(extents[len(extents)-1])-base, len(extents))
}

// place tells a window where the extents stand in it, and how many they are.
func place(w *gds.Window, extents []chunk.Extent, base int64) int {
	for i, e := range extents {
		w.Extents[i] = gds.Extent{Offset: uint64(e.Off - base), Len: uint32(e.Len)}
	}
	return len(extents)
}

// leaveWindow decides what becomes of extents that failed in a window: they go without one, unless the GPU is lost or the job
// cancelled.
func (m *DeviceMemory) leaveWindow(lost, err error) (done bool, _ error) {
	if lost = errors.Join(lost, m.gpu.Err()); lost != nil || errors.Is(err, gds.ErrStopped) {
		return true, deviceError(errors.Join(lost, err))
	}
	m.gpu.WindowFailed(err)
	return false, nil
}
