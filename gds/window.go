package gds

import (
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"unsafe"
)

// Window is device memory of a copy thread. Staged bytes pass through it between the host's slot and the pages. The GPU
// computes the checksums there, from the bytes that crossed the bus, and the CPU only reads and writes files. The copy
// engines move a slot as one piece, which is faster than a kernel that reaches over the bus. A thread uses its window
// within one task only, so no task waits for a window.
type Window struct {
	Extents  []Extent // extents to sum, by their places in the window
	Sums     []uint64 // checksums, by extent
	Expected []uint64 // the expected Sums

	t       *Thread
	address uint64
	size    int
}

// threadMemory is the device memory of all windows of a GPU, or of all coders.
type threadMemory struct {
	bytes    atomic.Int64 // bytes of each thread's window; 0: disabled
	at       uint64
	failures atomic.Int32 // failures in a row
}

// failed counts a failure, and reports whether it disables the memory.
func (m *threadMemory) failed() bool { return m.failures.Add(1) >= failuresToDisable }

func (m *threadMemory) succeeded() {
	if m.failures.Load() > 0 {
		m.failures.Store(0)
	}
}

// windowExtents is the most extents that a window sums at once. 4 MiB have 64, unless pages are tiny.
const windowExtents = 2048

// windowTables is the page-locked memory of a window, in bytes.
const windowTables = windowExtents * int(unsafe.Sizeof(Extent{})+2*8)

// divide lays out page-locked memory of windowTables bytes.
func divide(notes []byte) (extents []Extent, sums, expected []uint64) {
	extents = unsafe.Slice((*Extent)(unsafe.Pointer(&notes[0])), windowExtents)
	sums = unsafe.Slice((*uint64)(unsafe.Pointer(&notes[windowExtents*int(unsafe.Sizeof(Extent{}))])), 2*windowExtents)
	return extents, sums[:windowExtents:windowExtents], sums[windowExtents:]
}

// FitsWindow reports whether the copy threads have windows for the given bytes and extents. There are no windows if
// they are not configured, after a lack of memory, and after [GPU.DisableWindows].
func (g *GPU) FitsWindow(bytes int64, extents int) bool {
	return extents <= windowExtents && bytes <= g.windows.bytes.Load()
}

// WindowFailed records that a window failed or held wrong bytes. Failures in a row, without [GPU.WindowSucceeded]
// between them, disable the windows for good.
func (g *GPU) WindowFailed(cause error) {
	if g.windows.failed() {
		g.DisableWindows(cause)
		return
	}
	g.driver.log.Warn("window failed, retrying without it", "gpu", g.UUID.String(), "error", cause)
}

// WindowSucceeded resets the count of [GPU.WindowFailed].
func (g *GPU) WindowSucceeded() { g.windows.succeeded() }

// DisableWindows disables the windows for good.
func (g *GPU) DisableWindows(cause error) {
	if g.windows.bytes.Swap(0) > 0 {
		g.driver.log.Error("windows disabled: the CPU computes staged checksums", "gpu", g.UUID.String(),
			"error", cause)
	}
}

// makeWindows allocates all windows. If memory is short there are no windows.
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
		g.driver.log.Warn("no device memory for windows: the CPU computes staged checksums", "gpu", g.UUID.String(),
			"error", err)
		return nil
	}
	g.windows.at = t.out[0]
	for i, other := range g.all[:g.cfg.Threads] {
		other.window.t, other.window.address, other.window.size = other, g.windows.at+uint64(i)*size, g.cfg.Window
	}
	g.windows.bytes.Store(int64(g.cfg.Window))
	return nil
}

// Window returns the thread's window, if [GPU.FitsWindow] is true.
func (t *Thread) Window() *Window { return &t.window }

// Begin starts a batch between pages and the window.
func (w *Window) Begin(dir Direction, flag *Flag) Batch {
	b := w.t.BeginDevice(dir, w.address, w.size, flag)
	b.blocks = w.blocks()
	return b
}

// blocks is the number of thread blocks of a kernel on a window. Such a kernel works within device memory, many times
// faster than the bus that brings the next window's bytes. So there is rarely more than one such kernel, however many
// windows are in use, and a small share of the blocks would only slow it down.
func (w *Window) blocks() int { return max(1, w.t.gpu.cfg.Blocks/2) }

// Upload starts to copy src to offset at of the window, and to sum the first n of its extents there. If one of the sums
// differs from the expected one, b, which scatters from the window, moves nothing. src, the extents and the expected
// sums are in use until b's [Batch.Wait] returns nil or, after an error, until [Window.Sync] returns.
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

// Differs returns the first of n sums that differs from the expected one, or -1. Call it after the batch has ended.
func (w *Window) Differs(n int) int {
	for i, want := range w.Expected[:n] {
		if w.Sums[i] != want {
			return i
		}
	}
	return -1
}

// Sync waits for all copies to and from the window.
func (w *Window) Sync() error { return w.t.wait() }

// Collect ends a batch that gathers into the window: it sums the first n extents, and copies them to the same places
// of dst. Bytes between extents are not touched.
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
	err = errors.Join(err, t.wait()) // no copy may run after the return
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
