// Package sendqueue queues a session's messages to its client.
package sendqueue

import (
	"context"
	"sync"
	"time"

	"github.com/kvhost/kvhost/host/proto"
)

// Queue holds messages until they are sent. Push never waits. When the queue exceeds its limit, the session's reader
// pauses in WaitRoom, so that only running jobs can add to it. If it stays over the limit for too long, the client is
// slow.
type Queue struct {
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

// New makes a queue that calls slow when it stays over the limit for after.
func New(limit int, after time.Duration, slow func()) *Queue {
	q := &Queue{limit: limit, after: after, wake: make(chan struct{}, 1)}
	q.slow = time.AfterFunc(time.Hour, slow)
	q.slow.Stop()
	return q
}

// Push adds a message. After Close it does nothing.
func (q *Queue) Push(m *proto.HostMessage) {
	q.mu.Lock()
	if q.closed {
		q.mu.Unlock()
		return
	}
	q.queue = append(q.queue, m)
	if len(q.queue) > q.limit && !q.over {
		q.over, q.room = true, make(chan struct{})
		q.slow.Reset(q.after)
	}
	q.mu.Unlock()
	q.signal()
}

func (q *Queue) signal() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// Close ends the writer after it has sent what is queued.
func (q *Queue) Close() {
	q.mu.Lock()
	q.closed = true
	q.slow.Stop()
	q.mu.Unlock()
	q.signal()
}

// Take swaps the queue for an empty one. ok is false when the queue is closed and empty.
func (q *Queue) Take(empty []*proto.HostMessage) (batch []*proto.HostMessage, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	batch, q.queue = q.queue, empty[:0]
	if q.over {
		q.over = false
		q.slow.Stop()
		close(q.room)
		q.room = nil
	}
	return batch, len(batch) > 0 || !q.closed
}

// WaitRoom returns when the queue is under its limit or the context is done.
func (q *Queue) WaitRoom(ctx context.Context) {
	q.mu.Lock()
	room := q.room
	q.mu.Unlock()
	if room != nil {
		select {
		case <-room:
		case <-ctx.Done():
		}
	}
}

// Run sends until the queue is closed and empty, or sending fails.
func (q *Queue) Run(send func(*proto.HostMessage) error) error {
	var batch []*proto.HostMessage
	for {
		var ok bool
		if batch, ok = q.Take(batch); !ok {
			return nil
		}
		for i, m := range batch {
			if err := send(m); err != nil {
				return err
			}
			batch[i] = nil
		}
		if len(batch) == 0 {
			<-q.wake
		}
	}
}
