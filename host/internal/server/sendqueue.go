package server

import (
	"context"
	"sync"
	"time"

	"github.com/kvhost/kvhost/host/internal/proto"
)

// sendQueue holds messages until they are sent. Push never waits. If the queue exceeds its limit, the session's reader pauses
// in WaitRoom, so that only running jobs can add messages. If the queue stays over the limit for too long, slow is called.
type sendQueue struct {
	limit int
	slow  *time.Timer
	gone  func(bytes int64)

	mu     sync.Mutex
	queue  []outgoing
	closed bool
	wake   chan struct{} // holds a token while the writer has work
	room   chan struct{} // closed when the queue has room again; nil if it has room
	after  time.Duration
}

// outgoing is a queued message and the number of bytes charged for it.
type outgoing struct {
	*proto.SessionResponse
	Bytes int64
}

// newSendQueue returns a queue. It calls slow when the queue stays over the limit for the duration after, and gone with the
// charged bytes of a message when the message is sent or dropped.
func newSendQueue(limit int, after time.Duration, slow func(), gone func(bytes int64)) *sendQueue {
	q := &sendQueue{limit: limit, after: after, gone: gone, wake: make(chan struct{}, 1)}
	q.slow = time.AfterFunc(time.Hour, slow)
	q.slow.Stop()
	return q
}

// Push adds a message. After Close the message is dropped.
func (q *sendQueue) Push(m outgoing) {
	q.mu.Lock()
	if q.closed {
		q.mu.Unlock()
		q.drop([]outgoing{m})
		return
	}
	q.queue = append(q.queue, m)
	if len(q.queue) > q.limit && q.room == nil {
		q.room = make(chan struct{})
		q.slow.Reset(q.after)
	}
	q.mu.Unlock()
	q.signal()
}

func (q *sendQueue) signal() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// Close makes the writer end after it has sent all queued messages.
func (q *sendQueue) Close() {
	q.mu.Lock()
	q.closed = true
	q.slow.Stop()
	q.mu.Unlock()
	q.signal()
}

// Take returns all queued messages and continues with an empty queue. ok is false if the queue is closed and empty.
func (q *sendQueue) Take(empty []outgoing) (batch []outgoing, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	batch, q.queue = q.queue, empty[:0]
	if q.room != nil {
		q.slow.Stop()
		close(q.room)
		q.room = nil
	}
	return batch, len(batch) > 0 || !q.closed
}

// WaitRoom waits until the queue is under its limit or the context is done.
func (q *sendQueue) WaitRoom(ctx context.Context) {
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

func (q *sendQueue) drop(list []outgoing) {
	for _, m := range list {
		if m.Bytes > 0 {
			q.gone(m.Bytes)
		}
	}
}

// Run sends messages until the queue is closed and empty, or until sending fails. After a failure it drops all messages that
// were not sent.
func (q *sendQueue) Run(send func(*proto.SessionResponse) error) error {
	var batch []outgoing
	for {
		var ok bool
		if batch, ok = q.Take(batch); !ok {
			return nil
		}
		for i, m := range batch {
			if err := send(m.SessionResponse); err != nil {
				q.drop(batch[i:])
				q.Close()
				batch, _ = q.Take(nil)
				q.drop(batch)
				return err
			}
			batch[i] = outgoing{}
			if m.Bytes > 0 {
				q.gone(m.Bytes)
			}
		}
		if len(batch) == 0 {
			<-q.wake
		}
	}
}
