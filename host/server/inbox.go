package server

import (
	"context"
	"sync"
	"sync/atomic"

	protobuf "google.golang.org/protobuf/proto"

	"github.com/kvhost/kvhost/host/proto"
)

// Bounds of the ordered messages that may queue behind a STORE that waits for space.
const (
	backlogSlots = 1 << 12
	backlogBytes = 64 << 20
)

// inbox handles a session's ordered messages one at a time: at once while nothing is queued, else on the executor.
type inbox struct {
	handle func(*proto.ClientMessage)

	turn   sync.Mutex // held while a message is handled; also guards what only such messages change
	closed bool       // under turn: no message is handled any more

	backlog chan *proto.ClientMessage
	waiting atomic.Int64 // messages given to the executor and not handled yet
	weight  atomic.Int64 // bytes that they take, by weigh
}

func newInbox(handle func(*proto.ClientMessage)) *inbox {
	return &inbox{handle: handle, backlog: make(chan *proto.ClientMessage, backlogSlots)}
}

// submit handles a message at once if nothing is queued before it and it does not wait for storage. Otherwise it
// queues it.
func (b *inbox) submit(m *proto.ClientMessage) error {
	if !slow(m) && b.waiting.Load() == 0 {
		b.inTurn(m)
		return nil
	}
	w := weigh(m)
	if have := b.weight.Load(); have > 0 && have+w > backlogBytes { // refuse instead of waiting: CANCEL must get through
		return faultf(proto.Code_CODE_LIMIT, "", "messages of %d bytes are queued already", have)
	}
	b.waiting.Add(1)
	b.weight.Add(w)
	select {
	case b.backlog <- m:
		return nil
	default:
		b.handled(m)
		return faultf(proto.Code_CODE_LIMIT, "", "%d messages are queued already", cap(b.backlog))
	}
}

// slow says whether a message may wait for storage.
func slow(m *proto.ClientMessage) bool {
	switch m.Body.(type) {
	case *proto.ClientMessage_Store, *proto.ClientMessage_Discard:
		return true
	}
	return false
}

// inTurn handles one message while no other is being handled.
func (b *inbox) inTurn(m *proto.ClientMessage) {
	b.turn.Lock()
	defer b.turn.Unlock()
	if !b.closed {
		b.handle(m)
	}
}

// handled counts a message that is no longer queued.
func (b *inbox) handled(m *proto.ClientMessage) {
	b.waiting.Add(-1)
	b.weight.Add(-weigh(m))
}

// execute handles the queued messages until the context is done.
func (b *inbox) execute(ctx context.Context) {
	for {
		select {
		case m := <-b.backlog:
			b.inTurn(m)
			b.handled(m)
		case <-ctx.Done():
			return
		}
	}
}

// close waits for the message being handled. No other will be.
func (b *inbox) close() {
	b.turn.Lock()
	defer b.turn.Unlock()
	b.closed = true
}

// weigh estimates the memory that a message takes. An element of a list takes much more here than on the wire.
func weigh(m *proto.ClientMessage) int64 {
	const each = 128
	n := each
	switch b := m.Body.(type) {
	case *proto.ClientMessage_Store:
		for _, c := range b.Store.GetChunks() {
			n += each + len(c.GetKey()) + len(c.GetParent()) + 4*len(c.GetBlocks())
		}
	case *proto.ClientMessage_Load:
		for _, c := range b.Load.GetChunks() {
			n += each + 4*len(c.GetBlocks())
		}
	case *proto.ClientMessage_Lookup:
		n += len(b.Lookup.GetKeys())
	case *proto.ClientMessage_Discard:
		n += len(b.Discard.GetKeys())
	default:
		n += each / 2 * protobuf.Size(m) // as if it were all empty elements
	}
	return int64(n)
}
