package server

import (
	"context"
	"sync"
	"time"

	"github.com/kvhost/kvhost/host/proto"
)

// outgoing is a session's queue of messages to its client. push never waits. When the queue exceeds its limit, the
// session's reader pauses, so that only running jobs can add to it. If it stays over the limit for too long, the
// client is slow.
type outgoing struct {
	limit int
	slow  *time.Timer

	mu     sync.Mutex
	queue  []*proto.HostMessage
	over   bool
	closed bool
	wake   chan struct{} // holds a token while the writer has something to do
	room   chan struct{} // closed when the queue falls under its limit again; nil while it is
	after  time.Duration
}

// newOutgoing makes a queue that calls slow when it stays over the limit for after.
func newOutgoing(limit int, after time.Duration, slow func()) *outgoing {
	o := &outgoing{limit: limit, after: after, wake: make(chan struct{}, 1)}
	o.slow = time.AfterFunc(time.Hour, slow)
	o.slow.Stop()
	return o
}

func (o *outgoing) push(m *proto.HostMessage) {
	o.mu.Lock()
	if o.closed {
		o.mu.Unlock()
		return
	}
	o.queue = append(o.queue, m)
	if len(o.queue) > o.limit && !o.over {
		o.over, o.room = true, make(chan struct{})
		o.slow.Reset(o.after)
	}
	o.mu.Unlock()
	o.signal()
}

func (o *outgoing) signal() {
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

// close ends the writer after it has sent what is queued.
func (o *outgoing) close() {
	o.mu.Lock()
	o.closed = true
	o.slow.Stop()
	o.mu.Unlock()
	o.signal()
}

// take swaps the queue for an empty one. ok is false when the queue is closed and empty.
func (o *outgoing) take(empty []*proto.HostMessage) (batch []*proto.HostMessage, ok bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	batch, o.queue = o.queue, empty[:0]
	if o.over {
		o.over = false
		o.slow.Stop()
		close(o.room)
		o.room = nil
	}
	return batch, len(batch) > 0 || !o.closed
}

// waitRoom returns when the queue is under its limit or the context is done.
func (o *outgoing) waitRoom(ctx context.Context) {
	o.mu.Lock()
	room := o.room
	o.mu.Unlock()
	if room != nil {
		select {
		case <-room:
		case <-ctx.Done():
		}
	}
}

// run is the session's writer. It sends until the queue is closed and empty, or sending fails.
func (o *outgoing) run(send func(*proto.HostMessage) error) error {
	var batch []*proto.HostMessage
	for {
		var ok bool
		if batch, ok = o.take(batch); !ok {
			return nil
		}
		for i, m := range batch {
			if err := send(m); err != nil {
				return err
			}
			batch[i] = nil
		}
		if len(batch) == 0 {
			<-o.wake
		}
	}
}
