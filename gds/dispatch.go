package gds

import (
	"runtime"
	"sync"
)

var dispatchDone = sync.Pool{New: func() any { return make(chan any, 1) }}

// Do runs fn with one of the GPU's threads for copies, which belongs to the caller during the call. It fails without
// running fn if the GPU is lost or closed. fn must not call Do.
func (g *GPU) Do(fn func(*Thread)) error {
	t, err := g.take(g.threads)
	if err != nil {
		return err
	}
	defer func() { g.threads <- t }()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := t.enter(); err != nil {
		return err
	}
	fn(t)
	return nil
}

// take waits for an idle thread of a pool.
func (g *GPU) take(pool chan *Thread) (t *Thread, err error) {
	if err := g.Err(); err != nil {
		return nil, err
	}
	select {
	case <-g.closed:
		return nil, ErrClosed
	default:
	}
	select {
	case t = <-pool:
	case <-g.closed:
		return nil, ErrClosed
	}
	select {
	case <-g.closed:
		pool <- t
		return nil, ErrClosed
	default:
	}
	return t, nil
}

// Control runs fn on the thread that is reserved for rare calls, so that these never wait behind transfers.
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
	g.control.do(func(t *Thread) { err = fn(t) })
	return err
}
