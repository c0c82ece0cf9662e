package gds

import "sync"

var dispatchDone = sync.Pool{New: func() any { return make(chan any, 1) }}

// Do runs fn on one of the GPU's threads for copies and waits for it. It fails without running fn if the GPU is lost
// or closed. fn must not call Do. A panic of fn is raised in the caller.
func (g *GPU) Do(fn func(*Thread)) error { return g.dispatch(g.threads, fn) }

func (g *GPU) dispatch(pool chan *Thread, fn func(*Thread)) error {
	if err := g.Err(); err != nil {
		return err
	}
	select {
	case <-g.closed:
		return ErrClosed
	default:
	}
	var t *Thread
	select {
	case t = <-pool:
	case <-g.closed:
		return ErrClosed
	}
	defer func() { pool <- t }()
	select {
	case <-g.closed:
		return ErrClosed
	default:
	}
	done := dispatchDone.Get().(chan any)
	t.do(done, fn)
	dispatchDone.Put(done)
	return nil
}

// Control runs fn on the thread that is reserved for rare calls, so that they never wait behind transfers.
func (g *GPU) Control(fn func(*Thread) error) (err error) {
	if err := g.Err(); err != nil {
		return err
	}
	g.ctlMu.Lock()
	defer g.ctlMu.Unlock()
	select {
	case <-g.closed:
		return ErrClosed
	default:
	}
	g.control.do(make(chan any, 1), func(t *Thread) { err = fn(t) })
	return err
}
