package transfer

import (
	"sync/atomic"
	"time"
)

// A store that waits holds the client's blocks and serves nobody yet, so one that has waited too long is given up: better a
// chunk less in the cache than blocks that an engine cannot use. Loads are never given up: somebody waits for them.

// turns says of each chunk of a store whether a worker has begun it. What none has begun when the time is over is shed.
type turns struct {
	taken []atomic.Bool
	left  atomic.Int64
	timer *time.Timer // nil: they may wait for as long as they must
}

// newTurns calls shed for every chunk that has not begun after limit; 0 is no limit.
func newTurns(chunks int, limit time.Duration, shed func(i int)) *turns {
	t := &turns{taken: make([]atomic.Bool, chunks)}
	t.left.Store(int64(chunks))
	if limit > 0 {
		t.timer = time.AfterFunc(time.Hour, func() {
			for i := range t.taken {
				if t.take(i) {
					shed(i)
				}
			}
		})
		t.timer.Reset(limit) // it uses the field
	}
	return t
}

// take gives chunk i to who asks first.
func (t *turns) take(i int) bool {
	if t.taken[i].Swap(true) {
		return false
	}
	if t.left.Add(-1) == 0 && t.timer != nil {
		t.timer.Stop()
	}
	return true
}
