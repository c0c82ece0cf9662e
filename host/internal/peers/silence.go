package peers

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

const (
	stall        = 2 * time.Second // longest time without a byte during a read
	silenceSteps = 8               // steps in it
)

// silence ends a read to which no byte comes. It counts time in steps, and a step that ends late once: while this process was stopped
// or had no processor, it would not have seen what the peer sent.
type silence struct {
	step  time.Duration
	stop  func(cause error)
	steps atomic.Int32 // without a byte

	mu    sync.Mutex
	timer *time.Timer
	over  bool
}

// newSilence calls stop after the longest time without a byte.
func newSilence(longest time.Duration, stop func(cause error)) *silence {
	q := &silence{step: longest / silenceSteps, stop: stop}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.timer = time.AfterFunc(q.step, q.pass)
	return q
}

// pass ends a step.
func (q *silence) pass() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.over {
		return
	}
	if q.steps.Add(1) >= silenceSteps {
		q.stop(fmt.Errorf("%w for %s", errSilent, silenceSteps*q.step))
		return
	}
	q.timer.Reset(q.step)
}

// heard records that bytes have come. The step in which they come is not counted, as it may end at once.
func (q *silence) heard() { q.steps.Store(-1) }

func (q *silence) end() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.over = true
	q.timer.Stop()
}
