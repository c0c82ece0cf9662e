package server

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/kvhost/kvhost/host/internal/budget"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/spans"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/kv"
)

// sharedLease keeps a lookup's entries pinned for the ranks that will load them. The engine's mutex guards it.
type sharedLease struct {
	id      uint64
	owner   *granted // of the session that looked up
	request uint32   // the client's number
	group   uint32
	keys    int // of the LOOKUP
	first   int // its first needed key: pins are indexed from there
	pins    *store.Lease
	bytes   int64  // of the entries, in the session's share
	order   uint64 // of all leases of the host: an older one has a lower number
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

// hold counts a lease's entries. Where they are scarce, as many bytes of leases end of the tenant that holds most, the oldest
// first: else leases that are not loaded could keep other tenants from storing anything. A tenant alone keeps its leases.
func (s *Server) hold(l *sharedLease) {
	bytes, scarce := l.pins.Holds()
	l.owner.share.Leased(bytes)
	l.bytes, l.order = bytes, s.leases.Add(1)
	if !scarce {
		return
	}
	tenant, alone := s.greediest()
	if alone {
		return
	}
	for ended := int64(0); ended < bytes; {
		e, oldest := s.oldestLease(tenant)
		if oldest == nil {
			return
		}
		s.budgets.Ended(s.cfg.Log, tenant)
		e.mu.Lock()
		e.early = append(e.early[max(0, len(e.early)-mostEarly):], oldest.id)
		e.mu.Unlock()
		e.endLease(oldest)
		ended += oldest.bytes
	}
}

// greed is which tenant's leases hold most.
type greed struct {
	mu     sync.Mutex
	tenant uint32
	alone  bool
	at     time.Time
}

// greediest is the tenant of which leases hold most bytes, and whether it is the only one with an engine. An entry counts once,
// however many of its leases hold it: a shared prefix is no greed. All leases are looked at, so it is done once a second.
func (s *Server) greediest() (tenant uint32, alone bool) {
	s.greed.mu.Lock()
	defer s.greed.mu.Unlock()
	if !s.greed.at.IsZero() && time.Since(s.greed.at) < time.Second {
		return s.greed.tenant, s.greed.alone
	}
	s.mu.Lock()
	engines := slices.Collect(maps.Values(s.engines))
	s.mu.Unlock()
	held, seen, most := map[uint32]int64{}, map[uint32]*store.Seen{}, int64(-1)
	for _, e := range engines {
		tenant := e.key.tenant
		if seen[tenant] == nil {
			seen[tenant] = &store.Seen{}
		}
		e.mu.Lock()
		for _, l := range e.leases {
			held[tenant] += l.pins.Unseen(seen[tenant])
		}
		e.mu.Unlock()
		if held[tenant] > most {
			most, s.greed.tenant = held[tenant], tenant
		}
	}
	s.greed.alone, s.greed.at = len(seen) < 2, time.Now()
	return s.greed.tenant, s.greed.alone
}

// mostEarly is how many leases an engine remembers that ended before their time.
const mostEarly = 1 << 10

// oldestLease is a tenant's, of those that can be loaded.
func (s *Server) oldestLease(tenant uint32) (of *servingEngine, oldest *sharedLease) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for key, e := range s.engines {
		if key.tenant != tenant {
			continue
		}
		e.mu.Lock()
		if l := e.byAge.younger; l != nil && l != &e.byAge && (oldest == nil || l.order < oldest.order) {
			of, oldest = e, l
		}
		e.mu.Unlock()
	}
	return of, oldest
}

// The low bits of a lease's number are its group's place in the namespace. So the layers of a load are known even
// when its lease is over, and all of its semaphores can be written.
const groupBits = 8

var _ [1<<groupBits - proto.MaxGroups]struct{} // every group's place fits

// granted reports whether key i of the LOOKUP may be loaded.
func (l *sharedLease) granted(i int) bool { return i >= l.first && i < l.keys && l.pins.Has(i-l.first) }

// grant registers a lease that has hits, and returns its number.
func (e *servingEngine) grant(l *sharedLease) (uint64, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if limit := l.owner.limits.Leases; l.owner.leases >= limit {
		return 0, faultf(proto.Code_CODE_LIMIT, "lease", "%d leases of this session are not over", limit)
	}
	if err := l.owner.share.Take(budget.Grants, l.grants()); err != nil {
		return 0, err
	}
	e.lastLease++
	place := slices.IndexFunc(e.facts.namespace.Groups, func(g kv.Group) bool { return g.ID == l.group })
	l.id = e.lastLease<<groupBits | uint64(place)
	e.leases[l.id] = l
	e.enlist(l)
	l.owner.leases++
	l.timer = time.AfterFunc(l.owner.leaseTTL, func() { e.endLease(l) })
	return l.id, nil
}

// find looks up a lease. A number that was granted once and is gone is over; any other was never granted.
func (e *servingEngine) find(id uint64) (*sharedLease, error) {
	if l := e.leases[id]; l != nil {
		return l, nil
	}
	if n := id >> groupBits; n == 0 || n > e.lastLease {
		return nil, errLeaseUnknown
	}
	if slices.Contains(e.early, id) {
		return nil, errLeaseEarly
	}
	return nil, errLeaseOver
}

// leased returns the group of a lease's number, nil if no group has it.
func (e *servingEngine) leased(id uint64) *kv.Group {
	groups := e.facts.namespace.Groups
	if place := id & (1<<groupBits - 1); place < uint64(len(groups)) {
		return &groups[place]
	}
	return nil
}

// peek finds a lease without using it up.
func (e *servingEngine) peek(id uint64) (*sharedLease, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.find(id)
}

// take uses up one reader's share of a lease. loaded must follow.
func (e *servingEngine) take(l *sharedLease, reader uint64) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if l.readers&reader == 0 {
		return errLeaseOver
	}
	l.readers &^= reader
	l.loading++
	if l.readers == 0 {
		e.remove(l)
	}
	return nil
}

// loaded ends one reader's load.
func (e *servingEngine) loaded(l *sharedLease) {
	e.mu.Lock()
	l.loading--
	last := l.loading == 0 && l.readers == 0
	e.mu.Unlock()
	if last {
		l.release()
	}
}

// endLease releases or expires a lease: no further load starts, and running loads keep their pins.
func (e *servingEngine) endLease(l *sharedLease) {
	e.mu.Lock()
	live := l.readers != 0
	if live {
		l.readers = 0
		e.remove(l)
	}
	release := live && l.loading == 0
	e.mu.Unlock()
	if release {
		l.release()
	}
}

// remove takes a lease off the table.
func (e *servingEngine) remove(l *sharedLease) {
	l.timer.Stop()
	delete(e.leases, l.id)
	l.older.younger, l.younger.older = l.younger, l.older
	l.owner.leases--
}

// enlist makes a lease the youngest of the ring that byAge is in.
func (e *servingEngine) enlist(l *sharedLease) {
	if e.byAge.younger == nil {
		e.byAge.older, e.byAge.younger = &e.byAge, &e.byAge
	}
	l.older, l.younger = e.byAge.older, &e.byAge
	l.older.younger, e.byAge.older = l, l
}

// endLeases ends the leases of a session, those of one request unless all is set.
func (e *servingEngine) endLeases(g *granted, request uint32, all bool) {
	e.mu.Lock()
	var list []*sharedLease
	for _, l := range e.leases {
		if l.owner == g && (all || l.request == request) {
			list = append(list, l)
		}
	}
	e.mu.Unlock()
	// policies get the unpins in order
	slices.SortFunc(list, func(a, b *sharedLease) int { return cmp.Compare(a.id, b.id) })
	for _, l := range list {
		e.endLease(l)
	}
}
