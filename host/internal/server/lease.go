package server

import (
	"sync"
	"time"

	"github.com/kvhost/kvhost/host/internal/budget"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/spans"
	"github.com/kvhost/kvhost/host/internal/store"
)

// sharedLease keeps a lookup's entries pinned for the ranks that will load them. The engine's mutex guards it.
type sharedLease struct {
	id      uint64
	owner   *granted // what the engine has granted to the session that looked up
	request uint32   // the client's number of the request
	group   uint32
	keys    int // how many keys the LOOKUP has
	first   int // the first key that the LOOKUP needs: pins begin there
	pins    *store.Lease
	bytes   int64  // the entries' size, which the session's share has
	order   uint64 // the age among all leases of the host: an older lease has a lower number
	older   *sharedLease
	younger *sharedLease
	readers uint64 // local ranks that have not loaded yet; 0 when it is over
	loading int
	timer   *time.Timer
	span    spans.Span // of the LOOKUP
}

// release gives back the pins of a lease that was granted, and its memory.
func (l *sharedLease) release() {
	l.pins.Release()
	l.owner.share.Give(budget.Grants, l.grants())
	l.owner.share.Give(budget.Entries, l.bytes)
}

// grants are the memory that the lease takes.
func (l *sharedLease) grants() int64 { return int64(l.keys-l.first) + budget.PerLease }

// The low bits of a lease's number are its group's place in the namespace. So the layers of a load are known even
// when its lease is over, and all of its semaphores can be written.
const groupBits = 8

var _ [1<<groupBits - proto.MaxGroups]struct{} // every group's place fits

// granted is what an engine has granted to one of its sessions. The engine's mutex guards the requests and the number of leases.
type granted struct {
	limits   *Limits
	leaseTTL time.Duration
	share    *budget.Session
	requests map[uint32]struct{}
	leases   int
}

func newGranted(cfg *Config, sh *budget.Session) *granted {
	return &granted{limits: &cfg.Limits, leaseTTL: cfg.LeaseTTL, share: sh, requests: map[uint32]struct{}{}}
}

// granted reports whether key i of the LOOKUP may be loaded.
func (l *sharedLease) granted(i int) bool { return i >= l.first && i < l.keys && l.pins.Has(i-l.first) }

// greed is which tenant's leases hold most.
type greed struct {
	mu     sync.Mutex
	tenant uint32
	alone  bool
	at     time.Time
}
