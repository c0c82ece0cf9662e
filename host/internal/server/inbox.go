package server

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/kvhost/kvhost/host/internal/proto"
)

// backlogSlots bounds the ordered messages that may queue behind one that waits for storage. The session's share of the
// memory bounds their bytes.
const backlogSlots = 1 << 12

// inbox handles a session's ordered messages one at a time: at once while nothing is queued, else on the executor.
type inbox struct {
	handle func(*proto.SessionRequest) // both are called with the turn held
	drop   func(*proto.SessionRequest) // instead of handle, once the session has ended

	Turn   sync.Mutex // held while a message is handled; also guards what only such messages change
	closed bool       // under Turn: no message is handled any more

	backlog chan *proto.SessionRequest
	waiting atomic.Int64 // messages given to the executor and not handled yet
	ended   atomic.Bool
}

// Submit handles a message at once if nothing is queued before it and it does not wait for storage, as DISCARD does. Otherwise
// it queues it.
func (b *inbox) Submit(m *proto.SessionRequest) error {
	if m.GetDiscard() == nil && b.waiting.Load() == 0 {
		b.inTurn(m)
		return nil
	}
	b.waiting.Add(1)
	select {
	case b.backlog <- m:
		if b.ended.Load() {
			b.dropAll()
		}
		return nil
	default: // refuse instead of waiting: CANCEL must get through
		b.waiting.Add(-1)
		return fmt.Errorf("%w: %d", errInboxFull, cap(b.backlog))
	}
}

// inTurn handles one message while no other is being handled.
func (b *inbox) inTurn(m *proto.SessionRequest) {
	b.Turn.Lock()
	defer b.Turn.Unlock()
	if b.closed {
		b.drop(m)
		return
	}
	b.handle(m)
}

// Execute handles the queued messages until the context is done.
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

// Close waits for the message being handled. No other will be.
func (b *inbox) Close() {
	b.Turn.Lock()
	defer b.Turn.Unlock()
	b.closed = true
	b.ended.Store(true)
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
