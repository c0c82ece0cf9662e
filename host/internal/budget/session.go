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

// Session holds the parts of the budgets that one session has. It is safe for concurrent use.
type Session struct {
	held      [shared]*Holder
	namespace int64 // bytes charged for the namespace
	of        *Sessions
	tenant    atomic.Pointer[paced] // nil before HELLO
	weight    int64                 // weight of the latest message
	units     int                   // tasks of a job's chunk, according to HELLO

	mu       sync.Mutex
	messages map[uint64]int64 // bytes of unanswered messages by id
}

// Indexes of the budgets in Session.held.
const (
	inMemory = iota
	inDescriptors
	inRoom
	inLeased
	inMappings
	shared
)

// Use is a purpose for which a session takes a part of a budget.
type Use int

const (
	Grants      Use = iota // memory of keys of leases
	Regions                // memory of tables of pages
	Requests               // memory of requests
	Descriptors            // files that wait for the message that names them
	Pieces                 // files kept open between the steps of a load
	Room                   // bytes on disk reserved by stores that wait
	Entries                // bytes of leased entries
	Mappings               // mappings of clients' files
)

// PerLease is the memory of a lease, in units of Grants.
const PerLease = 32

// uses maps each use to its budget and part, and to the amount that one unit takes.
var uses = [...]struct {
	in, part int
	each     int64
}{
	Grants: {inMemory, partLeases, grantBytes}, Regions: {inMemory, partRegions, regionBytes},
	Requests: {inMemory, partSessions, requestBytes}, Descriptors: {inDescriptors, partWaiting, 1}, Pieces: {inDescriptors, partPieces, 1},
	Room: {inRoom, 0, 1}, Entries: {inLeased, 0, 1}, Mappings: {inMappings, 0, 1},
}

// Take takes n for a use. The error is a [Refusal] if the session may not have it.
func (h *Session) Take(u Use, n int64) error {
	use := &uses[u]
	return h.held[use.in].Take(use.part, n*use.each)
}

// Give returns n of a use.
func (h *Session) Give(u Use, n int64) {
	use := &uses[u]
	h.held[use.in].Give(use.part, n*use.each)
}

// New adds a session to the budgets. It fails if a budget has no share left.
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

// Greeted charges the memory of HELLO, which is kept as long as the session, and sets the session's name and tenant in the
// budgets.
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

// Leave releases the session's own resources. Resources of its jobs count until the jobs are over.
func (h *Session) Leave() {
	h.held[inMemory].Give(partSessions, sessionBytes+h.namespace)
	if t := h.tenant.Load(); t != nil {
		h.of.pace.leave(t)
	}
	h.leave()
}

// Held returns the memory that the session holds.
func (h *Session) Held() int64 { return h.held[inMemory].Held() }

// Spent adds the time since the handling of a message began. It returns the time for which the session must not read the next
// message, so that its tenant leaves other tenants their part of the processors.
func (h *Session) Spent(since time.Time) time.Duration {
	t := h.tenant.Load()
	if t == nil {
		return 0
	}
	now := time.Now()
	return h.of.pace.spent(t, spentOn(h.weight, now.Sub(since)), now, h.of.Processors)
}

// Received charges the memory of a message until it is answered.
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

// Answered returns the charge of a message that has its last answer. The caller must return it with Sent.
func (h *Session) Answered(id uint64) int64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	bytes := h.messages[id]
	delete(h.messages, id)
	return bytes
}

// Sent returns the charge of an answer that was sent.
func (h *Session) Sent(bytes int64) { h.held[inMemory].Give(partMessages, bytes) }

// Unanswered returns the charge of a message that gets no answer.
func (h *Session) Unanswered(id uint64) { h.Sent(h.Answered(id)) }

// Leased counts the bytes of entries that a lease holds, even beyond the session's share. Which leases end when a root has
// little room left does not depend on this share alone.
func (h *Session) Leased(bytes int64) { h.held[inLeased].Count(0, bytes) }

// Keep reports whether the session may keep one more file of a piece open between the steps of a load.
func (h *Session) Keep() bool { return h.Take(Pieces, 1) == nil }

// Gone returns a file that Keep has counted.
func (h *Session) Gone() { h.Give(Pieces, 1) }
