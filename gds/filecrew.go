package gds

import (
	"errors"
	"fmt"
	"sync"
	"time"
)

// fileCrew are a GPU's threads for cuFile's calls. A call cannot be interrupted, so one that takes longer than its limit is
// given up by who asked, and its thread is away with it for as long as it lasts. Another thread takes the place, as long as
// no more are away than there are in the crew.
type fileCrew struct {
	gpu  *GPU
	size int
	idle chan *Thread

	mu      sync.Mutex
	there   int           // idle, or at work for somebody who waits, or being made ready
	away    int           // with a call that was given up
	changed chan struct{} // told after either changes
}

func newFileCrew(g *GPU, size int) *fileCrew {
	return &fileCrew{gpu: g, size: size, idle: make(chan *Thread, 2*size), changed: make(chan struct{}, 1)}
}

// HungError is a cuFile operation that was given up. It is [ErrHung].
type HungError struct {
	Limit time.Duration
	ended chan struct{}
}

func (e *HungError) Error() string { return fmt.Sprintf("%v after %s", ErrHung, e.Limit) }

// Unwrap says what it is.
func (e *HungError) Unwrap() error { return ErrHung }

// Ended is closed once the operation has ended after all. Until then its memory and its file are in use.
func (e *HungError) Ended() <-chan struct{} { return e.ended }

// fileTask is one operation and its result, which nobody but the thread touches from the time it is given up.
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

// DoFile is Do on one of the threads for cuFile's calls: copies never wait behind storage.
func (g *GPU) DoFile(fn func(*Thread)) error { return g.on(g.files.idle, fn) }

// DoFileFor is DoFile for a function that is given up after some time, and also if that passes before a thread is free: then
// the answer is an [ErrHung]. ran says whether the function was begun; a [HungError] says when it has ended. 0 is no limit.
func (g *GPU) DoFileFor(limit time.Duration, fn func(*Thread) error) (ran bool, err error) {
	if limit <= 0 {
		lost := g.DoFile(func(t *Thread) { ran, err = true, fn(t) })
		return ran, errors.Join(lost, err)
	}
	if err := g.Err(); err != nil {
		return false, err
	}
	task := fileTasks.Get().(*fileTask)
	task.timer.Reset(limit)
	var t *Thread
	select {
	case <-g.closed:
		err = ErrClosed
	case <-task.timer.C:
		err = fmt.Errorf("%w: every thread of the GPU is with a call that does not end", ErrHung)
	case t = <-g.files.idle:
	}
	if err != nil {
		task.timer.Stop()
		fileTasks.Put(task)
		return false, err
	}
	task.fn = fn
	t.orders <- order{task.run, task.done}
	var panicked any
	select {
	case panicked = <-task.done:
	case <-task.timer.C:
		hung := &HungError{Limit: limit, ended: make(chan struct{})}
		g.files.leave()
		go func() {
			if v := <-task.done; v != nil { // nobody waits for it any more
				g.driver.log.Error("a cuFile call panicked after it was given up", "gpu", g.UUID.String(), "panic", fmt.Sprint(v))
			}
			g.files.comeBack(t)
			close(hung.ended)
		}()
		return true, hung
	}
	g.files.idle <- t
	err = task.err
	task.timer.Stop()
	task.fn, task.err = nil, nil
	fileTasks.Put(task)
	if panicked != nil {
		panic(panicked)
	}
	return true, err
}

func (c *fileCrew) add(t *Thread) {
	c.mu.Lock()
	c.there++
	c.mu.Unlock()
	c.idle <- t
}

// leave says that a thread's call was given up, and has another take its place.
func (c *fileCrew) leave() {
	c.mu.Lock()
	c.away++
	replaced := c.away <= c.size
	if !replaced {
		c.there--
	}
	c.mu.Unlock()
	c.tell()
	if replaced {
		go c.replace()
	}
}

// replace readies a thread, which may take the driver a while.
func (c *fileCrew) replace() {
	g := c.gpu
	t := g.driver.takeThread()
	var err error
	t.do(make(chan any, 1), func(t *Thread) { err = t.bind(g, nil) })
	g.mu.Lock()
	g.all = append(g.all, t)
	g.mu.Unlock()
	if err == nil {
		c.idle <- t
		return
	}
	g.driver.log.Warn("a thread for cuFile cannot be replaced while its call hangs", "gpu", g.UUID.String(), "error", err)
	c.mu.Lock()
	c.there--
	c.mu.Unlock()
	c.tell()
}

// comeBack takes a thread in again whose call has ended after all, unless its place is taken.
func (c *fileCrew) comeBack(t *Thread) {
	c.mu.Lock()
	c.away--
	wanted := c.there < c.size
	if wanted {
		c.there++
	}
	c.mu.Unlock()
	if wanted {
		c.idle <- t
	} else {
		c.gpu.retire(t)
	}
	c.tell()
}

// retire keeps a thread for another GPU.
func (g *GPU) retire(t *Thread) {
	g.mu.Lock()
	for i, other := range g.all {
		if other == t {
			g.all = append(g.all[:i:i], g.all[i+1:]...)
			break
		}
	}
	g.mu.Unlock()
	t.do(make(chan any, 1), func(t *Thread) { _ = t.unbind() }) // what is left of a stream ends with the context
	g.driver.mu.Lock()
	g.driver.parked = append(g.driver.parked, t)
	g.driver.mu.Unlock()
}

func (c *fileCrew) tell() {
	select {
	case c.changed <- struct{}{}:
	default:
	}
}

// drain takes all threads that are there, each when it has nothing to do, and says how many are away.
func (c *fileCrew) drain() (away int) {
	for got := 0; ; {
		c.mu.Lock()
		over := got == c.there
		away = c.away
		c.mu.Unlock()
		if over {
			return away
		}
		select {
		case <-c.idle:
			got++
		case <-c.changed:
		}
	}
}

// Stuck is how many cuFile operations that were given up have not ended.
func (g *GPU) Stuck() int {
	g.files.mu.Lock()
	defer g.files.mu.Unlock()
	return g.files.away
}
