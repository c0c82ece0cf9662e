package gds

import (
	"fmt"
	"math"
	"sync/atomic"
	"unsafe"

	"github.com/kvhost/kvhost/gds/internal/kernels"
)

// Mode is a way of copying pages.
type Mode int32

// Modes, from the fastest for small pages to the one that always works.
const (
	Kernel     Mode = iota // one launch per batch
	SingleCopy             // one driver call per piece
)

func (m Mode) String() string {
	if m < Kernel || m > SingleCopy {
		return fmt.Sprintf("mode %d", int32(m))
	}
	return [...]string{"kernel", "single copies"}[m]
}

// copyMode is a GPU's present way of copying pages, and its failures in a row.
type copyMode struct {
	current  atomic.Int32 // a Mode
	failures atomic.Int32
}

// Mode returns the present way of copying the GPU's pages.
func (g *GPU) Mode() Mode { return Mode(g.mode.current.Load()) }

// Direction is the direction of a batch.
type Direction uint32

// Directions. The numbers are the kernel's.
const (
	Gather  Direction = 0 // pages to buffer
	Scatter Direction = 1 // buffer to pages
)

// Piece is a run of page bytes and its place in the buffer. The layout is the kernel's.
type Piece struct {
	Page   uint64 // device address
	Offset uint32 // offset in the buffer
	Len    uint32
}

// Flag stops a job's batches when it is set. The kernel polls it.
type Flag struct {
	word *atomic.Uint32 // in pinned memory
	pool chan *Flag     // the pool to return to; nil for the flag that is never set
}

// flagPool holds the unused flags.
type flagPool struct {
	free  chan *Flag
	never *Flag // always 0
}

// NewFlag takes a flag, which Release returns. If all flags are in use, it returns a flag that cannot be set.
func (g *GPU) NewFlag() *Flag {
	select {
	case f := <-g.flags.free:
		f.word.Store(0)
		return f
	default:
		return g.flags.never
	}
}

// Set stops the batches that have the flag, each before its next piece.
func (f *Flag) Set() {
	if f.pool != nil {
		f.word.Store(1)
	}
}

// IsSet reports whether Set was called.
func (f *Flag) IsSet() bool { return f.word.Load() != 0 }

// Release returns the flag. No batch may use it any more.
func (f *Flag) Release() {
	if f.pool != nil {
		f.pool <- f
	}
}

// Batch moves pieces between pages and one buffer. Add and AddRows take any number of pieces; [Batch.Wait] moves the rest.
type Batch struct {
	t          *Thread
	dir        Direction
	buffer     uint64 // the buffer's address on the GPU, or on the host if it is not registered
	pinned     bool
	size       int
	flag       *Flag
	n          int
	row        uint32 // bytes of a row of the added pieces; 0: they have no rows
	stride     uint64 // distance of their rows in a page
	blocks     int    // thread blocks of the kernel; 0: a share of all blocks
	epoch      uint32 // number of the batch, for its launches; 0 before the first
	noWait     bool   // do not wait for the kernel
	uploading  bool   // an upload or decoding precedes the batch, so wait for the stream even if the batch is empty
	kernelOnly bool   // only the kernel may move the batch, since only the kernel checks the sums
}

// Begin starts a batch on this thread, which runs one at a time. A buffer that is not registered with the driver is
// copied piece by piece. flag may be nil.
func (t *Thread) Begin(dir Direction, buffer []byte, flag *Flag) Batch {
	if flag == nil {
		flag = t.gpu.flags.never
	}
	b := Batch{t: t, dir: dir, size: len(buffer), flag: flag}
	if b.buffer, b.pinned = t.gpu.driver.pinnedAt(buffer); !b.pinned {
		b.buffer = uint64(startOf(buffer))
	}
	return b
}

// BeginDevice is Begin with a buffer in device memory.
func (t *Thread) BeginDevice(dir Direction, address uint64, size int, flag *Flag) Batch {
	if flag == nil {
		flag = t.gpu.flags.never
	}
	return Batch{t: t, dir: dir, size: size, flag: flag, buffer: address, pinned: true}
}

// Add adds one piece to the batch. A full batch is moved at once.
func (b *Batch) Add(page uint64, offset, length int) error {
	return b.AddRows(page, offset, length, 0, 0)
}

// AddRows adds a piece of rows of row bytes each. The last row may have fewer. In the buffer the rows are adjacent. In
// device memory the first begins at address page, and each next one stride bytes later. Pieces of equal rows share a
// launch.
func (b *Batch) AddRows(page uint64, offset, length int, row uint32, stride uint64) error {
	if offset < 0 || length < 0 || offset > b.size-length {
		return fmt.Errorf("%w: %d bytes at %d of a buffer of %d", ErrConfig, length, offset, b.size)
	}
	if stride > math.MaxUint32 { // the kernel has 32 bits for it
		for ; length > int(row) && row > 0; length -= int(row) {
			if err := b.AddRows(page, offset, int(row), 0, 0); err != nil {
				return err
			}
			page, offset = page+stride, offset+int(row)
		}
		row, stride = 0, 0
	}
	if b.n == len(b.t.pieces) || b.n > 0 && (b.row != row || b.stride != stride) {
		if err := b.Wait(); err != nil {
			return err
		}
	}
	b.row, b.stride = row, stride
	b.t.pieces[b.n] = Piece{Page: page, Offset: uint32(offset), Len: uint32(length)}
	b.n++
	return nil
}

// Wait moves the added pieces. When it returns, with or without an error, the batch touches neither pages nor buffer
// any more. It fails with [ErrStopped] if the flag was set before the end.
func (b *Batch) Wait() error {
	n := b.n
	b.n = 0
	if n == 0 {
		if b.uploading {
			return b.t.wait()
		}
		return nil
	}
	if err := b.t.gpu.Err(); err != nil {
		return err
	}
	if b.flag.IsSet() {
		return ErrStopped
	}
	if err := b.move(n); err != nil {
		return err
	}
	if b.flag.IsSet() {
		return ErrStopped
	}
	return nil
}

// queue starts the batch. If the kernel moves the pages, it does not wait for the end, because later work on this
// thread runs after the batch. Otherwise it is Wait. The caller must wait for the stream even after an error.
func (b *Batch) queue() error {
	b.noWait = true
	return b.Wait()
}

// move copies in the GPU's mode, and in the next mode if that fails. It waits for the stream before it tries another
// mode or returns an error, so that no copy is still running.
func (b *Batch) move(n int) error {
	g := b.t.gpu
	mode := g.Mode()
	if !b.pinned {
		mode = SingleCopy
	}
	for {
		var err error
		if mode == Kernel {
			err = b.launch(n)
		} else {
			err = b.singleCopies(n)
		}
		if err == nil {
			if g.mode.failures.Load() > 0 && g.Mode() == mode {
				g.mode.failures.Store(0)
			}
			return nil
		}
		idle := b.t.wait()
		if mode == SingleCopy || b.kernelOnly || idle != nil || g.Err() != nil {
			return err
		}
		g.modeFailed(mode, err)
		mode++
	}
}

// failuresToDisable is the number of failures in a row after which a way of copying is disabled for good. A single
// failure may be transient.
const failuresToDisable = 3

func (g *GPU) modeFailed(mode Mode, err error) {
	if g.Mode() != mode || g.mode.failures.Add(1) < failuresToDisable {
		return
	}
	if g.mode.current.CompareAndSwap(int32(mode), int32(mode+1)) {
		g.mode.failures.Store(0)
		g.driver.log.Warn("copy mode disabled after repeated failures", "gpu", g.UUID.String(),
			"mode", mode.String(), "next", (mode + 1).String(), "error", err)
	}
}

// launch runs the kernel. All kernels in flight share the configured thread blocks, except kernels on windows.
func (b *Batch) launch(n int) error {
	t, g := b.t, b.t.gpu
	if g.kernels.pages.function == 0 {
		return fmt.Errorf("%w: the copy kernel", ErrSymbol)
	}
	pieces, ok := g.driver.pinnedPieces(t.pieces)
	if !ok {
		return ErrUnpinned
	}
	blocks := min(b.blocks, n)
	if blocks == 0 {
		blocks = g.acquireBlocks(n)
		defer g.releaseBlocks()
	}
	if err := b.nextEpoch(); err != nil {
		return err
	}
	t.params = [len(t.params)]uint64{b.buffer, pieces, uint64(n), uint64(b.dir), g.driver.onGPU(g, b.flag), t.halted,
		uint64(b.epoch), uint64(b.row), b.stride}
	if err := t.start(g.kernels.pages, blocks, kernels.PagesThreads); err != nil || b.noWait {
		return err
	}
	return t.wait()
}

// nextEpoch numbers the batch. Its kernels stop when they find that number in the thread's halted word.
func (b *Batch) nextEpoch() error {
	t := b.t
	if b.epoch != 0 {
		return nil
	}
	if t.epoch++; t.epoch == 0 { // the counter wrapped, and 0 is the initial value of the word: clear old numbers
		t.epoch = 1
		if err := t.Fill(t.halted, 0, 4); err != nil {
			return err
		}
	}
	b.epoch = t.epoch
	return nil
}

// pinnedPieces returns the address of a thread's pieces on the GPU.
func (d *Driver) pinnedPieces(p []Piece) (uint64, bool) {
	return d.pinnedAt(unsafe.Slice((*byte)(unsafe.Pointer(&p[0])), len(p)*int(unsafe.Sizeof(Piece{}))))
}

// onGPU returns the address of a flag on the GPU.
func (d *Driver) onGPU(g *GPU, f *Flag) uint64 {
	at := uintptr(unsafe.Pointer(f.word)) - startOf(g.shared)
	base, _ := d.pinnedAt(g.shared[at : at+4])
	return base
}

// singleCopies copies each piece, or each row of it, with a call of its own.
func (b *Batch) singleCopies(n int) error {
	t := b.t
	for i := range n {
		if b.flag.IsSet() {
			break
		}
		p := &t.pieces[i]
		row := b.row
		if row == 0 {
			row = max(1, p.Len)
		}
		for k := uint64(0); k*uint64(row) < uint64(p.Len); k++ {
			to, from := p.Page+k*b.stride, b.buffer+uint64(p.Offset)+k*uint64(row)
			if b.dir == Gather {
				to, from = from, to
			}
			n := min(uint64(row), uint64(p.Len)-k*uint64(row))
			if err := t.call(&t.gpu.driver.fn.memcpyAsync, uintptr(to), uintptr(from), uintptr(n), t.stream); err != nil {
				return err
			}
		}
	}
	return t.wait()
}
