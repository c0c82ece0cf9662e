package budget

import (
	"fmt"
	"sync"

	protobuf "google.golang.org/protobuf/proto"

	"github.com/kvhost/kvhost/host/internal/proto"
)

// Session is what a session holds. It is safe for concurrent use.
type Session struct {
	memory      *Holder
	descriptors *Holder
	room        *Holder
	leased      *Holder
	mappings    *Holder
	namespace   int64 // bytes of it

	mu       sync.Mutex
	messages map[uint64]int64 // bytes by id, of messages that are not answered
}

// New makes what a new session holds, or says why there is no share for it.
func (b *Sessions) New(session uint64) (_ *Session, err error) {
	name := fmt.Sprintf("session %d", session)
	h := &Session{messages: map[uint64]int64{}}
	var joined []*Holder
	defer func() {
		if err != nil {
			for _, j := range joined {
				j.Leave()
			}
		}
	}()
	for _, j := range []struct {
		budget *Budget
		holder **Holder
	}{{b.Memory, &h.memory}, {b.Descriptors, &h.descriptors}, {b.Room, &h.room}, {b.Leased, &h.leased}, {b.Mappings, &h.mappings}} {
		if *j.holder, err = j.budget.Join(name, 0); err != nil {
			return nil, err
		}
		joined = append(joined, *j.holder)
	}
	return h, h.memory.Take(partSessions, sessionBytes)
}

// Greeted takes the memory of what HELLO says, which is kept as long as the session, and tells the budgets which session it is.
func (h *Session) Greeted(session uint64, m *proto.Hello) error {
	name := fmt.Sprintf("session %d (%s)", session, m.GetEngine())
	for _, holder := range h.holders() {
		holder.Is(name, m.GetTenant())
	}
	bytes := namespaceBytes * int64(protobuf.Size(m.GetNamespace()))
	if err := h.memory.Take(partSessions, bytes); err != nil {
		return err
	}
	h.namespace = bytes
	return nil
}

func (h *Session) holders() []*Holder {
	return []*Holder{h.memory, h.descriptors, h.room, h.leased, h.mappings}
}

// Leave releases what the session itself holds. What its jobs hold counts until they are over.
func (h *Session) Leave() {
	h.memory.Give(partSessions, sessionBytes+h.namespace)
	for _, holder := range h.holders() {
		holder.Leave()
	}
}

// Held is the memory that the session holds.
func (h *Session) Held() int64 { return h.memory.Held() }

// Received takes the memory of a message until it is answered.
func (h *Session) Received(m *proto.SessionRequest) error {
	bytes := weigh(m)
	if bytes == 0 {
		return nil
	}
	if err := h.memory.Take(partMessages, bytes); err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.messages[m.GetId()] = bytes
	return nil
}

// Answered returns the memory of a message that has its last answer. It is given back by Sent.
func (h *Session) Answered(id uint64) int64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	bytes := h.messages[id]
	delete(h.messages, id)
	return bytes
}

// Sent gives back the memory of an answer.
func (h *Session) Sent(bytes int64) { h.memory.Give(partMessages, bytes) }

// Unanswered gives back the memory of a message that gets no answer.
func (h *Session) Unanswered(id uint64) { h.Sent(h.Answered(id)) }

// Lease takes the memory of a lease of so many keys.
func (h *Session) Lease(keys int) error {
	return h.memory.Take(partLeases, leaseBytes+grantBytes*int64(keys))
}

// Leased takes the bytes of the entries that a lease holds in roots. Where they are scarce, a session gets no more than its
// share.
func (h *Session) Leased(bytes int64, scarce bool) error {
	if scarce {
		return h.leased.Take(0, bytes)
	}
	h.leased.Exceed(0, bytes)
	return nil
}

// LeaseOver gives the memory of a lease back.
func (h *Session) LeaseOver(keys int) { h.memory.Give(partLeases, leaseBytes+grantBytes*int64(keys)) }

// Unleased gives the bytes of entries back.
func (h *Session) Unleased(bytes int64) { h.leased.Give(0, bytes) }

// Regions takes the memory of the tables of so many regions.
func (h *Session) Regions(n int) error { return h.memory.Take(partRegions, regionBytes*int64(n)) }

// RegionsGone gives it back.
func (h *Session) RegionsGone(n int) { h.memory.Give(partRegions, regionBytes*int64(n)) }

// Request takes the memory of a request.
func (h *Session) Request() error { return h.memory.Take(partSessions, requestBytes) }

// RequestOver gives it back.
func (h *Session) RequestOver() { h.memory.Give(partSessions, requestBytes) }

// Descriptor takes a file descriptor that waits for its message.
func (h *Session) Descriptor() error { return h.descriptors.Take(partWaiting, 1) }

// DescriptorsGone gives so many back.
func (h *Session) DescriptorsGone(n int) { h.descriptors.Give(partWaiting, int64(n)) }

// Keep says whether the session may keep one more file of a piece open between the steps of a load.
func (h *Session) Keep() bool { return h.descriptors.Take(partPieces, 1) == nil }

// Gone gives such a file back.
func (h *Session) Gone() { h.descriptors.Give(partPieces, 1) }

// Mapping takes a mapping of a client's file.
func (h *Session) Mapping() error { return h.mappings.Take(0, 1) }

// Unmapped gives it back.
func (h *Session) Unmapped() { h.mappings.Give(0, 1) }

// Room takes room on disk for chunks of a store that waits for a semaphore.
func (h *Session) Room(bytes int64) error { return h.room.Take(0, bytes) }

// RoomFree gives it back.
func (h *Session) RoomFree(bytes int64) { h.room.Give(0, bytes) }
