package transfer

import (
	"sync/atomic"
	"time"
)

// queueTimeout sheds the chunks of a store that no worker has started within a limit. A queued store holds the client's
// blocks and helps no request yet. A missing chunk in the cache is better than blocks that an engine cannot use. Loads
// are never shed, since a request waits for them.
type queueTimeout struct {
	claimed []atomic.Bool // by chunk: a worker has started it, or it was shed
	left    atomic.Int64
	timer   *time.Timer // nil: no limit
}

// newQueueTimeout starts a timer that calls shed for every chunk that has not started after limit. A limit of 0 is
// none.
func newQueueTimeout(chunks int, limit time.Duration, shed func(i int)) *queueTimeout {
	t := &queueTimeout{claimed: make([]atomic.Bool, chunks)}
	t.left.Store(int64(chunks))
	if limit > 0 {
		t.timer = time.AfterFunc(time.Hour, func() {
			for i := range t.claimed {
				if t.claim(i) {
					shed(i)
				}
			}
		})
		t.timer.Reset(limit) // armed only now, since the function uses the field
	}
	return t
}

// claim gives chunk i to the first caller.
func (t *queueTimeout) claim(i int) bool {
	if t.claimed[i].Swap(true) {
		return false
	}
	if t.left.Add(-1) == 0 && t.timer != nil {
		t.timer.Stop()
	}
	return true
}
