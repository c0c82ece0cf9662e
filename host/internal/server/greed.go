package server

import (
	"maps"
	"slices"
	"time"

	"github.com/kvhost/kvhost/host/internal/store"
)

// hold charges a lease's entries to its session. If pinned space is scarce, it also ends leases of the tenant that pins the
// most, the oldest first, until they add up to the size of the new lease. Otherwise leases that are never loaded could keep
// other tenants from storing anything. If only one tenant has engines, its leases stay.
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

// greediest returns the tenant with the most bytes pinned by its leases, and whether it is the only tenant with an engine. An entry
// counts once for each tenant, so several leases on a shared prefix do not add up. The result is computed from all leases and
// is therefore kept for a second.
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

// mostEarly is the number of early-ended leases that an engine remembers.
const mostEarly = 1 << 10

// oldestLease returns the oldest lease of a tenant that can still be loaded, and its engine.
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
