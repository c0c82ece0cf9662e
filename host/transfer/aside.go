package transfer

import "github.com/kvhost/kvhost/staging"

// aside is what a task has under way beside itself: one copy between pages and a window, while the task reads or writes the
// next window. The task waits for it before it uses that window again, and before it ends.
type aside struct {
	engine *Engine
	done   chan error
	under  bool // way
}

func newAside(e *Engine) *aside { return &aside{engine: e, done: make(chan error, 1)} }

// start runs fn on the engine's copiers, or here where they take nothing any more. Nothing is under way.
func (a *aside) start(fn func() error) {
	a.under = true
	run := func() {
		err := errPanicked // until fn has run to its end
		defer func() { a.done <- err }()
		err = fn()
	}
	if a.engine.copiers.Submit(staging.Read, run) != nil {
		run()
	}
}

// wait returns when nothing is under way, with the error of what was.
func (a *aside) wait() error {
	if a == nil || !a.under {
		return nil
	}
	a.under = false
	return <-a.done
}

// second takes another slot for a task that moves a large file to or from a GPU, if there is one: without it the task is
// slower and as right, so none waits for it.
func (e *Engine) second(m Memory, file int64, window []byte) *staging.Slot {
	if _, ok := m.(guardedMemory); !ok || file <= int64(len(window)) {
		return nil
	}
	slot, ok := e.slots.TryAcquire()
	if !ok {
		return nil
	}
	return slot
}
