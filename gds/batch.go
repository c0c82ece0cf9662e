package gds

import (
	"fmt"
	"sync/atomic"
	"unsafe"

	"github.com/kvhost/kvhost/gds/kernels"
)

// Mode is how pages are copied.
type Mode int32

// Modes, from the quickest for small pages to the one that always works.
const (
	Kernel     Mode = iota // one launch per batch
	BatchCopy              // one call of the driver per batch
	SingleCopy             // one call per piece
)

func (m Mode) String() string {
	if m < Kernel || m > SingleCopy {
		return fmt.Sprintf("mode %d", int32(m))
	}
	return [...]string{"kernel", "batch copy", "single copies"}[m]
}

// copyMode is how a GPU copies pages now, and how often in a row that failed.
type copyMode struct {
	current  atomic.Int32 // a Mode
	failures atomic.Int32
}

// Mode is how the GPU's pages are copied now.
func (g *GPU) Mode() Mode { return Mode(g.mode.current.Load()) }

// Direction says which way a batch goes.
type Direction uint32

// Directions. The numbers are the kernel's.
const (
	Gather  Direction = 0 // pages to buffer
	Scatter Direction = 1 // buffer to pages
)

// Piece is a run of page bytes and where it stands in the buffer. The layout is the kernel's.
type Piece struct {
	Page   uint64 // device address
	Offset uint32 // in the buffer
	Len    uint32
}

// Flag stops a job's batches when it is set. The kernel polls it.
type Flag struct {
	word *atomic.Uint32 // in pinned memory
	pool chan *Flag     // nil for the one that is never set
}

// flagPool holds the flags that no job has taken.
type flagPool struct {
	free  chan *Flag
	never *Flag // always 0
}

// NewFlag takes a flag, to be given back by Release. When too many jobs run, what it gives cannot be set.
func (g *GPU) NewFlag() *Flag {
	select {
	case f := <-g.flags.free:
		f.word.Store(0)
		return f
	default:
		return g.flags.never
	}
}

// Set stops the batches that were given the flag, each before its next piece.
func (f *Flag) Set() {
	if f.pool != nil {
		f.word.Store(1)
	}
}

// IsSet says whether Set was called.
func (f *Flag) IsSet() bool { return f.word.Load() != 0 }

// Release gives the flag back. No batch may hold it any more.
func (f *Flag) Release() {
	if f.pool != nil {
		f.pool <- f
	}
}

// copyScratch are the arrays that a batch copy is told.
type copyScratch struct {
	to, from, size [pieceSlots]uint64
	attributes     memcpyAttributes
	index          uint64
	failed         uint64
}

// Batch moves pieces between pages and one buffer. Pieces are added in any number; [Batch.Wait] ends it.
type Batch struct {
	t          *Thread
	dir        Direction
	buffer     uint64 // the buffer's address on the GPU; on the host where it is not registered
	pinned     bool
	size       int
	flag       *Flag
	n          int
	blocks     int    // for the kernel; 0: a share of what all have
	epoch      uint32 // of its launches; 0 before the first
	noWait     bool   // the kernel is not waited for
	uploading  bool   // something else was begun before it, and is to be waited for in any case
	kernelOnly bool   // only the kernel may move it, since that looks at the gate
}

// Begin starts a batch on this thread; one at a time. A buffer that is not registered with the driver is copied
// piece by piece. flag may be nil.
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

// Add puts one piece into the batch. What has gathered is moved when there is no room for it.
func (b *Batch) Add(page uint64, offset, length int) error {
	if offset < 0 || length < 0 || offset > b.size-length {
		return fmt.Errorf("%w: %d bytes at %d of a buffer of %d", ErrConfig, length, offset, b.size)
	}
	if b.n == len(b.t.pieces) {
		if err := b.Wait(); err != nil {
			return err
		}
	}
	b.t.pieces[b.n] = Piece{Page: page, Offset: uint32(offset), Len: uint32(length)}
	b.n++
	return nil
}

// Wait moves what was added and returns when it is done: nothing of the batch touches pages or buffer any more,
// whatever the answer. It fails with [ErrStopped] when the flag was set before the end.
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

// queue is Wait that does not wait, where the kernel moves the pages: what the thread begins next comes after it.
// After an error, too, the stream is to be waited for.
func (b *Batch) queue() error {
	b.noWait = true
	return b.Wait()
}

// move goes the GPU's way, and the next when that one fails. Before another way is tried, and before
// an error is told, the stream is waited for: nothing may still be moving.
func (b *Batch) move(n int) error {
	g := b.t.gpu
	mode := g.Mode()
	if !b.pinned {
		mode = SingleCopy
	}
	for {
		var err error
		switch mode {
		case Kernel:
			err = b.launch(n)
		case BatchCopy:
			err = b.batchCopy(n)
		default:
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

// failuresToDisable is how often in a row a way of copying must fail to be given up for good: what fails once may
// have failed for something that has passed.
const failuresToDisable = 3

func (g *GPU) modeFailed(mode Mode, err error) {
	if g.Mode() != mode || g.mode.failures.Add(1) < failuresToDisable {
		return
	}
	if g.mode.current.CompareAndSwap(int32(mode), int32(mode+1)) {
		g.mode.failures.Store(0)
		g.driver.log.Warn("pages are copied another way from now on", "gpu", g.UUID.String(), "was", mode.String(),
			"now", (mode + 1).String(), "error", err)
	}
}

// launch runs the kernel. All kernels in flight share the configured number of thread blocks, but for those of windows.
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
	t.params = [7]uint64{b.buffer, pieces, uint64(n), uint64(b.dir), g.driver.onGPU(g, b.flag), t.halted,
		uint64(b.epoch)}
	if err := t.start(g.kernels.pages, blocks, kernels.PagesThreads); err != nil || b.noWait {
		return err
	}
	return t.wait()
}

// nextEpoch gives the batch its number: where that stands in the thread's word halted, the batch is over.
func (b *Batch) nextEpoch() error {
	t := b.t
	if b.epoch != 0 {
		return nil
	}
	if t.epoch++; t.epoch == 0 { // what the word holds at first, and the numbers begin again: none may stand there from before
		t.epoch = 1
		if err := t.Fill(t.halted, 0, 4); err != nil {
			return err
		}
	}
	b.epoch = t.epoch
	return nil
}

// pinnedPieces is the address on the GPU of a thread's pieces.
func (d *Driver) pinnedPieces(p []Piece) (uint64, bool) {
	return d.pinnedAt(unsafe.Slice((*byte)(unsafe.Pointer(&p[0])), len(p)*int(unsafe.Sizeof(Piece{}))))
}

// onGPU is the address on the GPU of a flag.
func (d *Driver) onGPU(g *GPU, f *Flag) uint64 {
	at := uintptr(unsafe.Pointer(f.word)) - startOf(g.shared)
	base, _ := d.pinnedAt(g.shared[at : at+4])
	return base
}

func (b *Batch) endpoints(p *Piece) (to, from uint64) {
	if b.dir == Scatter {
		return p.Page, b.buffer + uint64(p.Offset)
	}
	return b.buffer + uint64(p.Offset), p.Page
}

// batchCopy gives all pieces to the copy engines in one call.
func (b *Batch) batchCopy(n int) error {
	t := b.t
	fn := &t.gpu.driver.fn
	if fn.memcpyBatchV2.addr == 0 && fn.memcpyBatch.addr == 0 {
		return fmt.Errorf("%w: %s", ErrSymbol, fn.memcpyBatch.name)
	}
	if t.copies == nil {
		t.copies = &copyScratch{}
	}
	c := t.copies
	c.attributes = memcpyAttributes{SourceOrder: sourceInStreamOrder}
	for i := range n {
		c.to[i], c.from[i] = b.endpoints(&t.pieces[i])
		c.size[i] = uint64(t.pieces[i].Len)
	}
	at := func(p unsafe.Pointer) uintptr { return uintptr(p) } // c is on the heap and t keeps it
	args := [...]uintptr{at(unsafe.Pointer(&c.to)), at(unsafe.Pointer(&c.from)), at(unsafe.Pointer(&c.size)),
		uintptr(n),
		at(unsafe.Pointer(&c.attributes)), at(unsafe.Pointer(&c.index)), 1}
	var err error
	if fn.memcpyBatchV2.addr != 0 {
		err = t.call(&fn.memcpyBatchV2, append(args[:], t.stream)...)
	} else {
		err = t.call(&fn.memcpyBatch, append(args[:], at(unsafe.Pointer(&c.failed)), t.stream)...)
	}
	if err != nil {
		return err
	}
	return t.wait()
}

// singleCopies makes a call for each piece.
func (b *Batch) singleCopies(n int) error {
	t := b.t
	for i := range n {
		if b.flag.IsSet() {
			break
		}
		p := &t.pieces[i]
		to, from := b.endpoints(p)
		if err := t.call(&t.gpu.driver.fn.memcpyAsync, uintptr(to), uintptr(from), uintptr(p.Len),
			t.stream); err != nil {
			return err
		}
	}
	return t.wait()
}
