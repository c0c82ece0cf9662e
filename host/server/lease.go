package server

import (
	"cmp"
	"slices"
	"time"

	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/proto"
)

// lease pins a lookup's entries for the readers that will load them. The engine's mutex guards it.
type lease struct {
	id      uint64
	owner   *session // who looked up
	request uint32   // the client's number
	group   uint32
	keys    int // of the LOOKUP
	first   int // its first needed key: pins count from there
	pins    pins
	readers uint64 // local ranks that have not loaded yet; 0 once it is over
	loading int
	timer   *time.Timer
}

// A lease's number ends with its group's place in the namespace: how many layers a load has is then known also when its lease
// is over, and all of its semaphores can be written.
const groupBits = 8

var _ [1<<groupBits - proto.MaxGroups]struct{} // every place fits

// granted says whether key index i of the LOOKUP may be loaded.
func (l *lease) granted(i int) bool { return i >= l.first && i < l.keys && l.pins.Has(i-l.first) }

// grant makes a lease of pins that hold something.
func (e *engine) grant(l *lease) (uint64, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if limit := e.server.cfg.Limits.Leases; l.owner.leases >= limit {
		return 0, faultf(proto.Code_CODE_LIMIT, "lease", "%d leases of this session are not over", limit)
	}
	e.lastLease++
	place := slices.IndexFunc(e.facts.namespace.Groups, func(g chunk.Group) bool { return g.ID == l.group })
	l.id = e.lastLease<<groupBits | uint64(place)
	e.leases[l.id] = l
	l.owner.leases++
	l.timer = time.AfterFunc(e.server.cfg.LeaseTTL, func() { e.endLease(l) })
	return l.id, nil
}

// find looks a lease up. A number that was given once and is not there any more is over, any other was never given.
func (e *engine) find(id uint64) (*lease, error) {
	if l := e.leases[id]; l != nil {
		return l, nil
	}
	if n := id >> groupBits; n == 0 || n > e.lastLease {
		return nil, errLeaseUnknown
	}
	return nil, errLeaseOver
}

// leased is the group of a lease's number, nil when it can be of none.
func (e *engine) leased(id uint64) *chunk.Group {
	groups := e.facts.namespace.Groups
	if place := id & (1<<groupBits - 1); place < uint64(len(groups)) {
		return &groups[place]
	}
	return nil
}

// peek finds a lease without using it.
func (e *engine) peek(id uint64) (*lease, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.find(id)
}

// take uses up one reader's share of a lease. loaded must follow.
func (e *engine) take(l *lease, reader uint64) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if l.readers&reader == 0 {
		return errLeaseOver
	}
	l.readers &^= reader
	l.loading++
	if l.readers == 0 {
		e.drop(l)
	}
	return nil
}

// loaded ends one reader's load.
func (e *engine) loaded(l *lease) {
	e.mu.Lock()
	l.loading--
	last := l.loading == 0 && l.readers == 0
	e.mu.Unlock()
	if last {
		l.pins.Release()
	}
}

// endLease is release and expiry: no further load begins, and running ones keep what they read from.
func (e *engine) endLease(l *lease) {
	e.mu.Lock()
	live := l.readers != 0
	if live {
		l.readers = 0
		e.drop(l)
	}
	release := live && l.loading == 0
	e.mu.Unlock()
	if release {
		l.pins.Release()
	}
}

// drop takes a lease off the table.
func (e *engine) drop(l *lease) {
	l.timer.Stop()
	delete(e.leases, l.id)
	l.owner.leases--
}

// endLeases ends those of a session, of one request unless all is set.
func (e *engine) endLeases(x *session, request uint32, all bool) {
	e.mu.Lock()
	var list []*lease
	for _, l := range e.leases {
		if l.owner == x && (all || l.request == request) {
			list = append(list, l)
		}
	}
	e.mu.Unlock()
	slices.SortFunc(list, func(a, b *lease) int { return cmp.Compare(a.id, b.id) }) // policies see the unpins in order
	for _, l := range list {
		e.endLease(l)
	}
}
