package server

import (
	"cmp"
	"slices"
	"time"

	"github.com/kvhost/kvhost/host/internal/budget"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/kv"
)

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
