package staging

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"sync"
	"sync/atomic"
	"time"
)

// Watch configures a [WatchedFS]. The functions may be nil, are called on many goroutines, and must not block.
type Watch struct {
	Limit time.Duration            // an operation that takes longer is abandoned; 0: no limit
	Admit func(Op) error           // called before an operation; its error fails the operation
	Seen  func(Op, string, error)  // called after an operation that failed or was abandoned
	Ended func(op Op, name string) // called when an abandoned operation has ended
}

// WatchedFS is an [FS] that abandons an operation that takes too long. A system call cannot be interrupted, so it runs
// on a helper goroutine. When the limit has passed, the caller gets a [HungError], and the helper stays in the call.
// The result of a late call is undone if possible: a file that it opened is closed.
//
// An abandoned read or write still uses the caller's memory: see [HungError.Ended].
type WatchedFS struct {
	Around
	watch Watch
	limit atomic.Int64 // Watch.Limit, or the value of SetLimit
	stuck atomic.Int64

	mu   sync.Mutex
	idle []*helper
	over bool
}

// Watched returns inner with a time limit. Close ends its helpers.
func Watched(inner FS, w Watch) *WatchedFS {
	f := &WatchedFS{watch: w}
	f.Around = Around{Inner: inner, Run: f.call}
	f.SetLimit(w.Limit)
	return f
}

// SetLimit changes [Watch].Limit for operations that start later.
func (f *WatchedFS) SetLimit(d time.Duration) { f.limit.Store(int64(d)) }

// Stuck returns the number of abandoned operations that have not ended.
func (f *WatchedFS) Stuck() int { return int(f.stuck.Load()) }

// Close ends the idle helpers. A stuck helper ends with its call. The FS can still be used.
func (f *WatchedFS) Close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.over = true
	for _, h := range f.idle {
		close(h.in)
	}
	f.idle = nil
}

// Held is the error of an abandoned operation that still uses the memory that was passed to it, until Ended is closed.
type Held interface {
	error
	Ended() <-chan struct{}
}

// HungError is the error of an abandoned operation. It is [ErrHung], and a [Held].
type HungError struct {
	Op    Op
	Name  string
	Limit time.Duration
	ended chan struct{}
}

func (e *HungError) Error() string {
	return fmt.Sprintf("%s %s: %v after %s", e.Op, e.Name, ErrHung, e.Limit)
}

func (e *HungError) Unwrap() error { return ErrHung }

// Ended is closed when the system call has returned. Until then it uses the memory that was passed to it.
func (e *HungError) Ended() <-chan struct{} { return e.ended }

// helper runs one task at a time.
type helper struct {
	in    chan task
	out   chan struct{} // has room for one
	timer *time.Timer
	state atomic.Uint32 // state of the task: taskRuns, taskEnded or taskGivenUp
	late  func()        // called at the end of an abandoned task; set before state
}

// turns is the number of equal parts of the limit. A pause of the process or the machine uses up one part, however long
// it lasts. The operation has the other parts to report that it ended during the pause.
const turns = 8

const (
	taskRuns = iota
	taskEnded
	taskGivenUp
)

// task is one operation with its results. Once it is abandoned, only the helper uses it.
type task interface {
	run()
	late() // undoes a result that came too late
}

// maxIdle bounds the idle helpers. There are as many busy helpers as operations.
const maxIdle = 64

func (f *WatchedFS) help() *helper {
	f.mu.Lock()
	if n := len(f.idle); n > 0 {
		h := f.idle[n-1]
		f.idle = f.idle[:n-1]
		f.mu.Unlock()
		return h
	}
	f.mu.Unlock()
	h := &helper{in: make(chan task), out: make(chan struct{}, 1), timer: time.NewTimer(time.Hour)}
	h.timer.Stop()
	go f.serve(h)
	return h
}

// rest keeps an idle helper, or ends it.
func (f *WatchedFS) rest(h *helper) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.over || len(f.idle) >= maxIdle {
		close(h.in)
		return
	}
	f.idle = append(f.idle, h)
}

func (f *WatchedFS) serve(h *helper) {
	for t := range h.in {
		t.run()
		if h.state.CompareAndSwap(taskRuns, taskEnded) {
			h.out <- struct{}{}
			continue
		}
		t.late()
		h.late()
		go f.rest(h) // on another goroutine, since it may close h.in, which this loop must then receive from
	}
}

// do runs a task. With an error the task was not run, or was abandoned, and its results must not be used.
func (f *WatchedFS) do(op Op, name string, t task) error {
	if f.watch.Admit != nil {
		if err := f.watch.Admit(op); err != nil {
			return pathError(op.String(), name, err)
		}
	}
	return f.attempt(op, name, t)
}

// attempt is do without Admit, for closes, which must always run.
func (f *WatchedFS) attempt(op Op, name string, t task) error {
	limit := time.Duration(f.limit.Load())
	if limit <= 0 {
		t.run()
		return nil
	}
	h := f.help()
	h.state.Store(taskRuns)
	h.in <- t
	for range turns {
		h.timer.Reset(limit / turns)
		select {
		case <-h.out:
			h.timer.Stop()
			f.rest(h)
			return nil
		case <-h.timer.C:
		}
	}
	hung := &HungError{Op: op, Name: name, Limit: limit, ended: make(chan struct{})}
	f.stuck.Add(1)
	h.late = func() {
		f.stuck.Add(-1)
		close(hung.ended)
		if f.watch.Ended != nil {
			f.watch.Ended(op, name)
		}
	}
	if !h.state.CompareAndSwap(taskRuns, taskGivenUp) { // the task ended just now
		f.stuck.Add(-1)
		<-h.out
		f.rest(h)
		return nil
	}
	f.seen(op, name, hung)
	return hung
}

func (f *WatchedFS) seen(op Op, name string, err error) {
	if err != nil && err != io.EOF && f.watch.Seen != nil {
		f.watch.Seen(op, name, err)
	}
}

// asked is a [Call] as a task, with its error.
type asked struct {
	Call
	err error
}

func (a *asked) run() { a.err = a.Do() }

func (a *asked) late() {
	if a.err == nil && a.Undo != nil {
		a.Undo()
	}
}

// call makes an operation. The error of an operation on two names has the new one.
func (f *WatchedFS) call(c Call) error {
	a := &asked{Call: c}
	name := cmp.Or(c.Other, c.Name)
	if err := f.do(c.Op, name, a); err != nil {
		return err
	}
	f.seen(c.Op, name, a.err)
	return a.err
}

// openDirect is OpenDirect as one operation, so that the limit covers the test of a new device too.
func (f *WatchedFS) openDirect(name string, flag int, perm fs.FileMode) (File, error) {
	return f.file(f.opened(name, func() (File, error) { return OpenDirect(f.Inner, name, flag, perm) }))
}

func (f *WatchedFS) OpenFile(name string, flag int, perm fs.FileMode) (File, error) {
	return f.file(f.Around.OpenFile(name, flag, perm))
}

func (f *WatchedFS) file(file File, err error) (File, error) {
	if err != nil {
		return nil, err
	}
	return &watchedFile{File: file, fs: f}, nil
}

func (f *WatchedFS) Lock(name string) (io.Closer, error) {
	lock, err := f.Around.Lock(name)
	if err != nil {
		return nil, err
	}
	return watchedLock{lock, f, name}, nil
}

// watchedLock is a lock with a release under the limit.
type watchedLock struct {
	io.Closer
	fs   *WatchedFS
	name string
}

func (l watchedLock) Close() error { return l.fs.release(l.name, l.Closer) }

// release closes something without asking Admit.
func (f *WatchedFS) release(name string, c io.Closer) error {
	a := &asked{Call: Call{Do: c.Close}}
	if err := f.attempt(OpClose, name, a); err != nil {
		return err
	}
	f.seen(OpClose, name, a.err)
	return a.err
}

// watchedFile is a [File] of a [WatchedFS].
type watchedFile struct {
	File
	fs *WatchedFS
}

// transfer is one read or write.
type transfer struct {
	file  File
	write bool
	p     []byte
	off   int64
	n     int
	err   error
}

var transfers = sync.Pool{New: func() any { return new(transfer) }}

func (t *transfer) run() {
	if t.write {
		t.n, t.err = t.file.WriteAt(t.p, t.off)
	} else {
		t.n, t.err = t.file.ReadAt(t.p, t.off)
	}
}

// late waits for an operation that was left under way: see [Held].
func (t *transfer) late() {
	var held Held
	if errors.As(t.err, &held) {
		<-held.Ended()
	}
}

func (f *watchedFile) transfer(op Op, p []byte, off int64) (int, error) {
	t := transfers.Get().(*transfer)
	*t = transfer{file: f.File, write: op == OpWrite, p: p, off: off}
	if err := f.fs.do(op, f.Name(), t); err != nil {
		return 0, err // the helper still uses t
	}
	n, err := t.n, t.err
	*t = transfer{}
	transfers.Put(t)
	f.fs.seen(op, f.Name(), err)
	return n, err
}

func (f *watchedFile) ReadAt(p []byte, off int64) (int, error) { return f.transfer(OpRead, p, off) }

func (f *watchedFile) WriteAt(p []byte, off int64) (int, error) { return f.transfer(OpWrite, p, off) }

func (f *watchedFile) Datasync() error {
	return f.fs.call(Call{Op: OpSync, Name: f.Name(), Do: f.File.Datasync})
}

func (f *watchedFile) Allocate(n int64) error {
	return f.fs.call(Call{Op: OpAllocate, Name: f.Name(), Do: func() error { return f.File.Allocate(n) }})
}

// Memory implements [MemoryFile]. It makes no system call that could hang, so it has no time limit.
func (f *watchedFile) Memory(n int64) (Segments, error) {
	if f.fs.watch.Admit != nil {
		if err := f.fs.watch.Admit(OpAllocate); err != nil {
			return nil, pathError(OpAllocate.String(), f.Name(), err)
		}
	}
	segments, err := MemoryOf(f.File, n)
	f.fs.seen(OpAllocate, f.Name(), err)
	return segments, err
}

// Shrink implements [MemoryFile].
func (f *watchedFile) Shrink(n int64) error { return Shrink(f.File, n) }

func (f *watchedFile) Stat() (Info, error) { return Told(f.fs.call, OpStat, f.Name(), f.File.Stat) }

func (f *watchedFile) Close() error { return f.fs.release(f.Name(), f.File) }
