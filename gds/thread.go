package gds

import (
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"unsafe"

	"github.com/ebitengine/purego"
	"golang.org/x/sys/unix"
)

// Thread is an operating system thread with a GPU's context current. It is only to be used inside the function that
// [GPU.Do] gave it to.
type Thread struct {
	gpu      *GPU
	tasks    chan task   // for a thread that is parked
	args     [24]uintptr // of the call in progress
	out      [4]uint64   // results of calls
	handle   [8]uint64   // an IPC handle
	access   memAccessDesc
	prop     memAllocationProp
	stream   uintptr      // this thread's own
	event    uintptr      // likewise
	pieces   []Piece      // pinned: what a kernel reads
	params   [7]uint64    // of a kernel, by value
	paramAt  [7]uintptr   // where each of them is
	halted   uint64       // a word in device memory by which a kernel's blocks tell each other to stop
	epoch    uint32       // of the kernel launched last
	async    asyncCall    // of cuFile
	affinity unix.CPUSet  // where the thread may run when it is kept nowhere
	bound    bool         // near the GPU
	copies   *copyScratch // made when the kernel is first not used
	window   Window       // of a thread for copies
}

// order is what a thread is asked to do.
type task struct {
	fn   func(*Thread)
	done chan any // a *panicked, or nil
}

// panicked carries a panic from a thread to who asked.
type panicked struct {
	value any
	stack []byte
}

func (p *panicked) String() string {
	return fmt.Sprintf("%v\non the GPU's thread:\n%s", p.value, p.stack)
}

// newThread starts a thread that never ends: one that knows the driver must not be destroyed.
func newThread() *Thread {
	t := &Thread{tasks: make(chan task)}
	go func() {
		runtime.LockOSThread()
		for o := range t.tasks {
			t.run(o)
		}
		select {} // never reached: orders is not closed
	}()
	return t
}

func (t *Thread) run(o task) {
	defer func() {
		if v := recover(); v != nil {
			o.done <- &panicked{v, debug.Stack()}
			return
		}
		o.done <- nil
	}()
	o.fn(t)
}

// do runs fn on the thread and waits.
func (t *Thread) do(done chan any, fn func(*Thread)) {
	t.tasks <- task{fn, done}
	if v := <-done; v != nil {
		panic(v)
	}
}

// call makes a CUDA call. A sticky failure takes the GPU out of service. Pointers among args are to fields of the
// thread, which is on the heap, or to memory outside it.
func (t *Thread) call(f *function, args ...uintptr) error {
	if f.addr == 0 {
		return fmt.Errorf("%w: %s", ErrSymbol, f.name)
	}
	n := copy(t.args[:], args)
	r, _, _ := purego.SyscallN(f.addr, t.args[:n]...)
	if code := Result(int32(r)); code != 0 {
		return t.failed(f, code)
	}
	return nil
}

func (t *Thread) failed(f *function, code Result) error {
	err := &Error{f.name, code}
	if code.Sticky() {
		t.gpu.markLost(err)
	}
	return err
}

// outAt is the address of a result field.
func (t *Thread) outAt(i int) uintptr { return uintptr(unsafe.Pointer(&t.out[i])) }

// bind makes the GPU's context current and gives the thread what it needs to copy.
func (t *Thread) bind(g *GPU, notes []byte) error {
	t.gpu = g
	t.bindCPUs(g)
	if len(notes) > 0 { // a thread for files moves no pages
		t.pieces = unsafe.Slice((*Piece)(unsafe.Pointer(&notes[0])), pieceSlots)
		t.window.divide(notes[pieceSlots*int(unsafe.Sizeof(Piece{})):])
	}
	fn := &g.driver.fn
	if err := t.call(&fn.ctxSetCurrent, g.ctx); err != nil {
		return err
	}
	const nonBlocking, blockingSync, noTiming = 1, 1, 2
	if err := t.call(&fn.streamCreate, t.outAt(0), nonBlocking); err != nil {
		return err
	}
	t.stream = uintptr(t.out[0])
	if err := t.call(&fn.eventCreate, t.outAt(0), blockingSync|noTiming); err != nil {
		return err
	}
	t.event = uintptr(t.out[0])
	return nil
}

// unbind gives up the thread's stream and event, and the context.
func (t *Thread) unbind() error {
	t.unbindCPUs()
	fn := &t.gpu.driver.fn
	var errs []error
	if t.event != 0 {
		errs = append(errs, t.call(&fn.eventDestroy, t.event))
	}
	if t.stream != 0 {
		errs = append(errs, t.call(&fn.streamDestroy, t.stream))
	}
	errs = append(errs, t.call(&fn.ctxSetCurrent, 0))
	t.event, t.stream, t.pieces, t.copies, t.window = 0, 0, nil, nil, Window{}
	return errors.Join(errs...)
}

// wait returns when all that the thread has queued on its stream is done. It sleeps, unless the GPU is configured to
// spin.
func (t *Thread) wait() error {
	fn := &t.gpu.driver.fn
	if t.gpu.cfg.Spin {
		return t.call(&fn.streamSynchronize, t.stream)
	}
	if err := t.call(&fn.eventRecord, t.event, t.stream); err != nil {
		return err
	}
	return t.call(&fn.eventSynchronize, t.event)
}

// GPU is the device that the thread is bound to.
func (t *Thread) GPU() *GPU { return t.gpu }
