package gds

import (
	"errors"
	"fmt"
	"sync"
	"time"
)

// filePool holds a GPU's threads for cuFile calls. A call cannot be interrupted, so a call that exceeds its limit is
// abandoned, and its thread is lost to the pool until the call returns. A new thread replaces it, as long as the
// abandoned threads are no more than the pool's size.
type filePool struct {
	gpu  *GPU
	size int
	idle chan *Thread

	mu        sync.Mutex
	usable    int           // threads that are idle, work for a waiting caller, or are being made ready
	abandoned int           // threads in an abandoned call
	changed   chan struct{} // notified after either changes
}

func newFilePool(g *GPU, size int) *filePool {
	return &filePool{gpu: g, size: size, idle: make(chan *Thread, 2*size), changed: make(chan struct{}, 1)}
}

// HungError is a cuFile operation that was abandoned. It is an [ErrHung].
type HungError struct {
	Limit time.Duration
	ended chan struct{}
}

func (e *HungError) Error() string { return fmt.Sprintf("%v after %s", ErrHung, e.Limit) }

func (e *HungError) Unwrap() error { return ErrHung }

// Ended is closed when the operation has returned. Until then its memory and its file are in use.
func (e *HungError) Ended() <-chan struct{} { return e.ended }

// fileTask is one operation and its result. Once it is abandoned, only its thread touches it.
type fileTask struct {
	fn    func(*Thread) error
	run   func(*Thread)
	err   error
	done  chan any
	timer *time.Timer
}

var fileTasks = sync.Pool{New: func() any {
	t := &fileTask{done: make(chan any, 1), timer: time.NewTimer(time.Hour)}
	t.timer.Stop()
	t.run = func(on *Thread) { t.err = t.fn(on) }
	return t
}}

// DoFile runs fn on one of the threads for cuFile calls, so that copies never wait behind storage, and waits for it. It fails
// as [GPU.Do] does. A panic of fn is raised in the caller.
func (g *GPU) DoFile(fn func(*Thread)) error {
	t, err := g.take(g.files.idle)
	if err != nil {
		return err
	}
	defer func() { g.files.idle <- t }()
	t.do(fn)
	return nil
}

// turns is the number of equal parts of an operation's limit. A pause of the process or the machine uses up one part,
// however long it lasts. The operation has the other parts to report that it ended during the pause.
const turns = 8

// DoFileFor is [GPU.DoFile] with a time limit; 0 is none. When the limit passes, fn is abandoned, and the error is a
// [HungError], with a channel that is closed when fn returns. If it passes before a thread is free, fn does not run, and the error is
// [ErrHung]. ran reports whether fn was started.
func (g *GPU) DoFileFor(limit time.Duration, fn func(*Thread) error) (ran bool, err error) {
	if limit <= 0 {
		lost := g.DoFile(func(t *Thread) { ran, err = true, fn(t) })
		return ran, errors.Join(lost, err)
	}
	if err := g.Err(); err != nil {
		return false, err
	}
	call := fileTasks.Get().(*fileTask)
	left := turns
	var t *Thread
	for t == nil {
		call.timer.Reset(limit / turns)
		select {
		case t = <-g.files.idle:
			continue
		case <-g.closed:
			err = ErrClosed
		case <-call.timer.C:
			if left--; left > 0 {
				continue
			}
			err = fmt.Errorf("%w: every thread of the GPU is in a hung call", ErrHung)
		}
		call.timer.Stop()
		fileTasks.Put(call)
		return false, err
	}
	call.fn = fn
	t.tasks <- task{call.run, call.done}
	var panicked any
	for runs := true; runs; {
		call.timer.Reset(limit / turns)
		select {
		case panicked = <-call.done:
			runs = false
		case <-call.timer.C:
			if left--; left == 0 {
				return true, g.abandon(t, call, limit)
			}
		}
	}
	g.files.idle <- t
	err = call.err
	call.timer.Stop()
	call.fn, call.err = nil, nil
	fileTasks.Put(call)
	if panicked != nil {
		panic(panicked)
	}
	return true, err
}

// abandon abandons a call that does not return, and returns its error.
func (g *GPU) abandon(t *Thread, call *fileTask, limit time.Duration) error {
	hung := &HungError{Limit: limit, ended: make(chan struct{})}
	g.files.abandon()
	go func() {
		if v := <-call.done; v != nil { // no caller is left to receive it
			g.driver.log.Error("abandoned cuFile call panicked", "gpu", g.UUID.String(), "panic", fmt.Sprint(v))
		}
		g.files.reclaim(t)
		close(hung.ended)
	}()
	return hung
}

func (p *filePool) add(t *Thread) {
	p.mu.Lock()
	p.usable++
	p.mu.Unlock()
	p.idle <- t
}

// abandon counts a thread with an abandoned call, and starts a replacement.
func (p *filePool) abandon() {
	p.mu.Lock()
	p.abandoned++
	replaced := p.abandoned <= p.size
	if !replaced {
		p.usable--
	}
	p.mu.Unlock()
	p.notify()
	if replaced {
		go p.replace()
	}
}

// replace makes a thread ready, which may take the driver a while.
func (p *filePool) replace() {
	g := p.gpu
	t := g.driver.acquireThread()
	var err error
	t.do(func(t *Thread) { err = t.bind(g, nil) })
	g.mu.Lock()
	g.all = append(g.all, t)
	g.mu.Unlock()
	if err == nil {
		p.idle <- t
		return
	}
	g.driver.log.Warn("cannot replace a thread in a hung cuFile call", "gpu", g.UUID.String(), "error", err)
	p.mu.Lock()
	p.usable--
	p.mu.Unlock()
	p.notify()
}

// reclaim returns a thread to the pool after its abandoned call has returned, unless a replacement fills its place.
func (p *filePool) reclaim(t *Thread) {
	p.mu.Lock()
	p.abandoned--
	wanted := p.usable < p.size
	if wanted {
		p.usable++
	}
	p.mu.Unlock()
	if wanted {
		p.idle <- t
	} else {
		p.gpu.park(t)
	}
	p.notify()
}

// park keeps a thread for another GPU.
func (g *GPU) park(t *Thread) {
	g.mu.Lock()
	for i, other := range g.all {
		if other == t {
			g.all = append(g.all[:i:i], g.all[i+1:]...)
			break
		}
	}
	g.mu.Unlock()
	t.do(func(t *Thread) { _ = t.unbind() }) // the rest of its stream ends with the context
	g.driver.mu.Lock()
	g.driver.parked = append(g.driver.parked, t)
	g.driver.mu.Unlock()
}

func (p *filePool) notify() {
	select {
	case p.changed <- struct{}{}:
	default:
	}
}

// drain takes all usable threads out of the pool, each when it is idle, and returns the number of those in abandoned
// calls.
func (p *filePool) drain() (abandoned int) {
	for got := 0; ; {
		p.mu.Lock()
		over := got == p.usable
		abandoned = p.abandoned
		p.mu.Unlock()
		if over {
			return abandoned
		}
		select {
		case <-p.idle:
			got++
		case <-p.changed:
		}
	}
}

// Hung returns the number of abandoned cuFile operations that have not returned.
func (g *GPU) Hung() int {
	g.files.mu.Lock()
	defer g.files.mu.Unlock()
	return g.files.abandoned
}
