package server

import (
	"sync"
	"time"

	"github.com/kvhost/kvhost/host/internal/budget"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/spans"
	"github.com/kvhost/kvhost/host/internal/store"
)

// sharedLease keeps the entries of a lookup pinned for the ranks that will load them. It is guarded by the engine's mutex.
type sharedLease struct {
	id      uint64
	owner   *granted // record of the session that looked up
	request uint32   // the client's number of the request
	group   uint32
	keys    int // number of keys in the LOOKUP
	first   int // index of the first key that the LOOKUP needs; pins begins with it
	pins    *store.Lease
	bytes   int64  // size of the entries, charged to the session
	order   uint64 // position among all leases of the host by age; lower is older
	older   *sharedLease
	younger *sharedLease
	readers uint64 // local ranks that have not loaded yet, as bits; 0 when the lease is over
	loading int
	timer   *time.Timer
	span    spans.Span // span of the LOOKUP
}

// release ends the pins of a granted lease and its charges.
func (l *sharedLease) release() {
	l.pins.Release()
	l.owner.share.Give(budget.Grants, l.grants())
	l.owner.share.Give(budget.Entries, l.bytes)
}

// grants returns the charge for the lease in units of [budget.Grants].
func (l *sharedLease) grants() int64 { return int64(l.keys-l.first) + budget.PerLease }

// groupBits is the number of low bits of a lease's number that hold the index of its group in the namespace. The layers of a
// load are therefore known even after its lease is over, and all of its semaphores can be written.
const groupBits = 8

var _ [1<<groupBits - proto.MaxGroups]struct{} // fails to compile unless every group index fits

// granted counts the leases and requests that one session has in its engine. It is guarded by the engine's mutex.
type granted struct {
	limits   *Limits
	leaseTTL time.Duration
	share    *budget.Session
	requests map[uint32]struct{}
	leases   int
}

// granted reports whether key i of the LOOKUP may be loaded.
func (l *sharedLease) granted(i int) bool { return i >= l.first && i < l.keys && l.pins.Has(i-l.first) }

// greed caches the result of greediest.
type greed struct {
	mu     sync.Mutex
	tenant uint32
	alone  bool
	at     time.Time
}
