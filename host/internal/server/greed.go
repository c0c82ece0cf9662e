package server

import (
	"maps"
	"slices"
	"time"

	"github.com/kvhost/kvhost/host/internal/store"
)

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
