package gds

import (
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"unsafe"
)

// Window is device memory of a copy thread, where what is staged stands for a moment between the host's slot and the
// pages. There the GPU makes the checksums, of the bytes that have crossed the bus, and the processor has only its
// reads and writes to do; and the copy engines move a slot as one piece, which is quicker than a kernel that reaches
// over the bus. A thread uses its window within one order only, so there is never one to wait for.
type Window struct {
	Extents  []Extent // what is to be summed: places within the window
	Sums     []uint64 // of each extent
	Expected []uint64 // what they should be

	t       *Thread
	address uint64
	size    int
}

// windowMemory is the device memory of all windows of a GPU.
type windowMemory struct {
	bytes    atomic.Int64 // of each thread's window; 0: none is to be used
	at       uint64
	failures atomic.Int32 // in a row
}

// windowExtents is the most extents that a window sums at a time: 4 MiB have 64 of them where pages are not tiny.
const windowExtents = 2048

// windowTables is the page-locked memory beside a window.
const windowTables = windowExtents * int(unsafe.Sizeof(Extent{})+2*8)

// divide lays the page-locked memory out.
func (w *Window) divide(notes []byte) {
	w.Extents = unsafe.Slice((*Extent)(unsafe.Pointer(&notes[0])), windowExtents)
	sums := unsafe.Slice((*uint64)(unsafe.Pointer(&notes[windowExtents*int(unsafe.Sizeof(Extent{}))])), 2*windowExtents)
	w.Sums, w.Expected = sums[:windowExtents:windowExtents], sums[windowExtents:]
}

// FitsWindow says whether the copy threads have windows for so many bytes and extents. They have none where they
// were not asked for, where there was no memory for them, and after [GPU.DisableWindows].
func (g *GPU) FitsWindow(bytes int64, extents int) bool {
	return extents <= windowExtents && bytes <= g.windows.bytes.Load()
}

// WindowFailed says that a window did not work, or did not hold what it should; [GPU.WindowSucceeded] that one did.
// After so many misses in a row that it is no passing matter the windows are given up for good.
func (g *GPU) WindowFailed(cause error) {
	if g.windows.failures.Add(1) >= failuresToDisable {
		g.DisableWindows(cause)
		return
	}
	g.driver.log.Warn("something failed in a window of the GPU and is done again", "gpu", g.UUID.String(), "error",
		cause)
}

// WindowSucceeded undoes what [GPU.WindowFailed] has counted.
func (g *GPU) WindowSucceeded() {
	if g.windows.failures.Load() > 0 {
		g.windows.failures.Store(0)
	}
}

// DisableWindows gives the windows up for good.
func (g *GPU) DisableWindows(cause error) {
	if g.windows.bytes.Swap(0) > 0 {
		g.driver.log.Error("the GPU's windows are used no more: the processor makes the checksums of what is staged",
			"gpu", g.UUID.String(), "error", cause)
	}
}

// makeWindows takes the memory of all windows. Without it there are none.
func (t *Thread) makeWindows() error {
	g := t.gpu
	if g.cfg.Window == 0 || g.kernels.sums.function == 0 {
		return nil
	}
	size := (uint64(g.cfg.Window) + 255) &^ 255
	if err := t.call(&g.driver.fn.memAlloc, t.outAt(0), uintptr(size)*uintptr(g.cfg.Threads)); err != nil {
		if Sticky(err) {
			return err
		}
		g.driver.log.Warn("no device memory for windows: the processor makes the checksums of what is staged", "gpu",
			g.UUID.String(), "error", err)
		return nil
	}
	g.windows.at = t.out[0]
	for i, other := range g.all[:g.cfg.Threads] {
		other.window.t, other.window.address, other.window.size = other, g.windows.at+uint64(i)*size, g.cfg.Window
	}
	g.windows.bytes.Store(int64(g.cfg.Window))
	return nil
}

// Window is the thread's, where [GPU.FitsWindow] says so.
func (t *Thread) Window() *Window { return &t.window }

// Begin starts a batch between pages and the window.
func (w *Window) Begin(dir Direction, flag *Flag) Batch {
	b := w.t.BeginDevice(dir, w.address, w.size, flag)
	b.blocks = w.blocks()
	return b
}

// blocks is how many thread blocks a kernel on a window takes. It runs within device memory, many times as quick as
// the bus that brings the next window's bytes, so there is hardly ever more than one, however many windows are in
// use: a share of a sixteenth would only make it slow.
func (w *Window) blocks() int { return max(1, w.t.gpu.cfg.Blocks/2) }

// Upload begins to copy src to the window, from offset at on, and to sum the first n of its extents there. If one of
// the sums is not the expected one, b, which scatters from the window, will move nothing. It has begun when Upload
// returns, not ended: src, the extents and what is expected are in use until b's [Batch.Wait] has returned nil, or
// else [Window.Sync].
func (w *Window) Upload(b *Batch, src []byte, at, n int) error {
	if err := w.checkRange(at, len(src)); err != nil {
		return err
	}
	t := w.t
	b.uploading = true
	if err := t.call(&t.gpu.driver.fn.memcpyAsync, uintptr(w.address)+uintptr(at), startOf(src), uintptr(len(src)),
		t.stream); err != nil || n == 0 {
		return err
	}
	if err := b.nextEpoch(); err != nil {
		return err
	}
	b.kernelOnly = true
	err := t.beginSum(w.address, w.Extents[:n], w.Sums[:n], w.Expected[:n], b.epoch, b.blocks)
	if err != nil || t.gpu.Mode() == Kernel {
		return err
	}
	return fmt.Errorf("%w: pages are not copied by kernel", ErrConfig)
}

// Differs says which of the first n sums was not the expected one, -1 if none: to be asked when the batch has ended.
func (w *Window) Differs(n int) int {
	for i, want := range w.Expected[:n] {
		if w.Sums[i] != want {
			return i
		}
	}
	return -1
}

// Settle waits until nothing moves in the window any more.
func (w *Window) Sync() error { return w.t.wait() }

// Collect ends a batch that gathers into the window: it sums the first n extents there, and copies those to the same
// places of dst. What lies between extents is not touched.
func (w *Window) Collect(b *Batch, n int, dst []byte) error {
	t := w.t
	err := b.queue()
	if err == nil {
		err = t.beginSum(w.address, w.Extents[:n], w.Sums[:n], nil, 0, b.blocks)
	}
	for i := 0; i < n && err == nil; {
		at := w.Extents[i].Offset
		end := at
		for ; i < n && w.Extents[i].Offset == end; i++ {
			end += uint64(w.Extents[i].Len)
		}
		if err = w.checkRange(int(at), int(end-at)); err == nil {
			err = t.call(&t.gpu.driver.fn.memcpyAsync, startOf(dst[at:end]), uintptr(w.address+at), uintptr(end-at),
				t.stream)
		}
	}
	err = errors.Join(err, t.wait()) // nothing may be moving, whatever the answer
	runtime.KeepAlive(dst)
	if err == nil && b.flag.IsSet() {
		return ErrStopped
	}
	return err
}

func (w *Window) checkRange(at, n int) error {
	if at < 0 || n < 0 || at > w.size-n {
		return fmt.Errorf("%w: %d bytes at %d of a window of %d", ErrConfig, n, at, w.size)
	}
	return nil
}
