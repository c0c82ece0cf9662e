package budget

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	protobuf "google.golang.org/protobuf/proto"

	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/kv"
)

// Session is what a session holds. It is safe for concurrent use.
type Session struct {
	held      [shared]*Holder
	namespace int64 // bytes of it
	of        *Sessions
	tenant    atomic.Pointer[paced] // nil before HELLO
	weight    int64                 // of the message that was received last
	units     int                   // tasks of a job's chunk, as HELLO says

	mu       sync.Mutex
	messages map[uint64]int64 // bytes by id, of messages that are not answered
}

// What all sessions share, as places in Session.held.
const (
	inMemory = iota
	inDescriptors
	inRoom
	inLeased
	inMappings
	shared
)

// Use is what a session holds a part of a budget for.
type Use int

const (
	Grants      Use = iota // memory of keys of leases
	Regions                // memory of tables of pages
	Requests               // memory of requests
	Descriptors            // files that wait for their message
	Pieces                 // files that are kept open between the steps of a load
	Room                   // bytes on disk for stores that wait
	Entries                // bytes of entries that leases hold
	Mappings               // of clients' files
)

// PerLease is the memory of a lease, in grants.
const PerLease = 32

// uses say of which budget and part each use is, and how much of it one takes.
var uses = [...]struct {
	in, part int
	each     int64
}{
	Grants: {inMemory, partLeases, grantBytes}, Regions: {inMemory, partRegions, regionBytes},
	Requests: {inMemory, partSessions, requestBytes}, Descriptors: {inDescriptors, partWaiting, 1}, Pieces: {inDescriptors, partPieces, 1},
	Room: {inRoom, 0, 1}, Entries: {inLeased, 0, 1}, Mappings: {inMappings, 0, 1},
}

// Take takes n for a use, or says why the session may not have it.
func (h *Session) Take(u Use, n int64) error {
	use := &uses[u]
	return h.held[use.in].Take(use.part, n*use.each)
}

// Give gives n of a use back.
func (h *Session) Give(u Use, n int64) {
	use := &uses[u]
	h.held[use.in].Give(use.part, n*use.each)
}

// New makes what a new session holds, or says why there is no share for it.
func (b *Sessions) New(session uint64) (*Session, error) {
	h := &Session{of: b, messages: map[uint64]int64{}}
	for i, of := range [shared]*Budget{b.Memory, b.Descriptors, b.Room, b.Leased, b.Mappings} {
		holder, err := of.Join(fmt.Sprintf("session %d", session), 0)
		if err != nil {
			h.leave()
			return nil, err
		}
		h.held[i] = holder
	}
	if err := h.held[inMemory].Take(partSessions, sessionBytes); err != nil {
		h.leave()
		return nil, err
	}
	return h, nil
}

func (h *Session) leave() {
	for _, holder := range h.held {
		if holder != nil {
			holder.Leave()
		}
	}
}

// Greeted takes the memory of what HELLO says, which is kept as long as the session, and tells the budgets which session it is.
func (h *Session) Greeted(session uint64, m *proto.Hello) error {
	name := fmt.Sprintf("session %d (%s)", session, m.GetEngine())
	for _, holder := range h.held {
		holder.Is(name, m.GetTenant())
	}
	bytes := namespaceBytes * int64(protobuf.Size(m.GetNamespace()))
	if err := h.held[inMemory].Take(partSessions, bytes); err != nil {
		return err
	}
	h.namespace = bytes
	h.tenant.Store(h.of.pace.enter(m.GetTenant()))
	return nil
}

// Leave releases what the session itself holds. What its jobs hold counts until they are over.
func (h *Session) Leave() {
	h.held[inMemory].Give(partSessions, sessionBytes+h.namespace)
	if t := h.tenant.Load(); t != nil {
		h.of.pace.leave(t)
	}
	h.leave()
}

// Held is the memory that the session holds.
func (h *Session) Held() int64 { return h.held[inMemory].Held() }

// Spent enters the time that the handling of a message has taken until now, and says for how long the session does not read
// the next one, so that its tenant leaves others their part of the processors.
func (h *Session) Spent(since time.Time) time.Duration {
	t := h.tenant.Load()
	if t == nil {
		return 0
	}
	now := time.Now()
	return h.of.pace.spent(t, spentOn(h.weight, now.Sub(since)), now, h.of.Processors)
}

// Received takes the memory of a message until it is answered.
func (h *Session) Received(m *proto.SessionRequest) error {
	if hello := m.GetHello(); hello != nil {
		n := hello.GetNamespace()
		h.units = int(min(n.GetUnits()/max(1, n.GetTensorParallel()), kv.MaxRanks))
	}
	bytes := weigh(m, max(1, h.units))
	h.weight = bytes
	if bytes == 0 {
		return nil
	}
	if err := h.held[inMemory].Take(partMessages, bytes); err != nil {
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
func (h *Session) Sent(bytes int64) { h.held[inMemory].Give(partMessages, bytes) }

// Unanswered gives back the memory of a message that gets no answer.
func (h *Session) Unanswered(id uint64) { h.Sent(h.Answered(id)) }

// Leased counts the bytes of entries that a lease holds: what of them ends when a root has little left is not the session's
// share alone.
func (h *Session) Leased(bytes int64) { h.held[inLeased].Count(0, bytes) }

// Keep says whether the session may keep one more file of a piece open between the steps of a load.
func (h *Session) Keep() bool { return h.Take(Pieces, 1) == nil }

// Gone gives such a file back.
func (h *Session) Gone() { h.Give(Pieces, 1) }
