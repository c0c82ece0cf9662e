package server

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/kvhost/kvhost/host/internal/proto"
)

// backlogSlots is the maximum number of messages that may queue behind a message that waits for storage. Their bytes are
// bounded by the session's share of the memory.
const backlogSlots = 1 << 12

// inbox handles the ordered messages of a session one at a time. It handles a message on the caller's goroutine if no other is
// queued, and on the executor otherwise.
type inbox struct {
	handle func(*proto.SessionRequest) // handle and drop are called with the turn held
	drop   func(*proto.SessionRequest) // called instead of handle after the session has ended

	Turn sync.Mutex // held while a message is handled; it also guards state that only such messages change

	backlog chan *proto.SessionRequest
	waiting atomic.Int64 // messages queued for the executor and not handled yet
	closed  atomic.Bool  // no further message is handled; changes only with the turn held
}

// Submit handles a message at once if none is queued before it and it is no DISCARD, which waits for storage. Otherwise it
// queues the message.
func (b *inbox) Submit(m *proto.SessionRequest) error {
	if m.GetDiscard() == nil && b.waiting.Load() == 0 {
		b.inTurn(m)
		return nil
	}
	b.waiting.Add(1)
	select {
	case b.backlog <- m:
		if b.closed.Load() {
			b.dropAll()
		}
		return nil
	default: // refuse instead of waiting, so that the reader can still receive a CANCEL
		b.waiting.Add(-1)
		return fmt.Errorf("%w: %d", errInboxFull, cap(b.backlog))
	}
}

// inTurn handles one message when no other is being handled.
func (b *inbox) inTurn(m *proto.SessionRequest) {
	b.Turn.Lock()
	defer b.Turn.Unlock()
	if b.closed.Load() {
		b.drop(m)
		return
	}
	b.handle(m)
}

// Execute handles queued messages until the context is done.
func (b *inbox) Execute(ctx context.Context) {
	for {
		select {
		case m := <-b.backlog:
			b.inTurn(m)
			b.waiting.Add(-1)
		case <-ctx.Done():
			return
		}
	}
}

// Close waits until the current message has been handled, and drops all others.
func (b *inbox) Close() {
	b.Turn.Lock()
	defer b.Turn.Unlock()
	b.closed.Store(true)
	b.dropAll()
}

func (b *inbox) dropAll() {
	for {
		select {
		case m := <-b.backlog:
			b.drop(m)
		default:
			return
		}
	}
}
