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

// Thread runs one operation at a time on a GPU, with its context current. A Thread for copies runs it on the caller's
// operating system thread, since waking another takes as long as a copy of 2 MiB. A Thread for cuFile calls, which may
// be abandoned, or for imports is an operating system thread of its own, near the GPU. Use it only inside the function
// that it was passed to.
type Thread struct {
	gpu      *GPU
	tasks    chan task   // received by the operating system thread; nil for copies
	args     [24]uintptr // arguments of the call in progress
	out      [4]uint64   // results of calls
	handle   [8]uint64   // an IPC handle
	stream   uintptr     // of this thread alone
	event    uintptr     // of this thread alone
	pieces   []Piece     // page-locked, since a kernel reads them
	params   [9]uint64   // parameters of a kernel, by value
	paramAt  [9]uintptr  // the addresses of params
	halted   uint64      // device address of the word that stops a kernel's blocks
	epoch    uint32      // number of the last batch
	affinity unix.CPUSet // CPUs of the thread before it was bound
	bound    bool        // bound to CPUs near the GPU
	window   Window      // only in a thread for copies
	coder    Coder       // only in a thread for copies
}

// task is a function for a thread to run.
type task struct {
	fn   func(*Thread)
	done chan any // a *panicked, or nil
}

// panicked carries a panic from a thread to the caller.
type panicked struct {
	value any
	stack []byte
}

func (p *panicked) String() string {
	return fmt.Sprintf("%v\non the GPU's thread:\n%s", p.value, p.stack)
}

// newThread starts a thread that never ends, since a thread that the driver knows must not be destroyed. Go keeps the
// threads of callers, too, unless a goroutine ends that is locked to one.
func newThread() *Thread {
	t := &Thread{tasks: make(chan task)}
	go func() {
		runtime.LockOSThread()
		for o := range t.tasks {
			t.run(o)
		}
		select {} // never reached: tasks is not closed
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
func (t *Thread) do(fn func(*Thread)) {
	if t.tasks == nil {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		fn(t)
		return
	}
	done := dispatchDone.Get().(chan any)
	t.tasks <- task{fn, done}
	v := <-done
	dispatchDone.Put(done)
	if v != nil {
		panic(v)
	}
}

// enter makes the GPU's context current. A caller's thread may have had another GPU's context.
func (t *Thread) enter() error { return t.call(&t.gpu.driver.fn.ctxSetCurrent, t.gpu.ctx) }

// call makes a CUDA call. A sticky error takes the GPU out of service. Pointers among args are to fields of the
// thread, which is on the heap, or to memory outside the heap.
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

// outAt returns the address of a result field.
func (t *Thread) outAt(i int) uintptr { return uintptr(unsafe.Pointer(&t.out[i])) }

// bind makes the GPU's context current and prepares the thread to copy.
func (t *Thread) bind(g *GPU, notes []byte) error {
	t.gpu = g
	if t.tasks != nil {
		t.bindCPUs(g)
	}
	if len(notes) > 0 { // a thread for files has none, since it copies no pages
		t.pieces = unsafe.Slice((*Piece)(unsafe.Pointer(&notes[0])), pieceSlots)
		tables := notes[pieceSlots*int(unsafe.Sizeof(Piece{})):]
		t.window.Extents, t.window.Sums, t.window.Expected = divide(tables)
		t.coder.Stored, t.coder.Sums, t.coder.Expected = divide(tables[windowTables:])
	}
	fn := &g.driver.fn
	if err := t.enter(); err != nil {
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

// unbind releases the thread's stream, its event and the context.
func (t *Thread) unbind() error {
	t.unbindCPUs()
	fn := &t.gpu.driver.fn
	errs := []error{t.enter()}
	if t.event != 0 {
		errs = append(errs, t.call(&fn.eventDestroy, t.event))
	}
	if t.stream != 0 {
		errs = append(errs, t.call(&fn.streamDestroy, t.stream))
	}
	errs = append(errs, t.call(&fn.ctxSetCurrent, 0))
	t.event, t.stream, t.pieces = 0, 0, nil
	t.window, t.coder = Window{}, Coder{}
	return errors.Join(errs...)
}

// wait returns when all work on the thread's stream is done.
func (t *Thread) wait() error {
	fn := &t.gpu.driver.fn
	if err := t.call(&fn.eventRecord, t.event, t.stream); err != nil {
		return err
	}
	return t.call(&fn.eventSynchronize, t.event)
}
