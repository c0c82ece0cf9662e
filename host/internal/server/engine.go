package server

import (
	"cmp"
	"maps"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/budget"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/transfer"
	"github.com/kvhost/kvhost/host/kv"
)

// servingEngine is the state that the sessions with one engine id share. It exists as long as there is such a session.
type servingEngine struct {
	key     engineKey
	facts   facts
	space   *catalog.Namespace
	numbers *requestNumbers
	ended   func(request uint32, hints abi.Hints) // called when the last session has ended a request

	sessions int // guarded by the server's mutex

	mu        sync.Mutex
	leases    map[uint64]*sharedLease
	byAge     sharedLease // head of the ring of leases: its neighbours are the youngest and the oldest lease
	early     []uint64    // the latest leases that the host ended to free room for others
	lastLease uint64
	requests  map[uint32]*request
	queues    [kv.MaxRanks]*transfer.Queue // queue of the registered memory, by local rank
}

// engineKey identifies an engine. The tenant is a part of it, so a tenant can neither take the name of another tenant's engine
// nor learn whether it is in use.
type engineKey struct {
	tenant uint32
	id     string
}

// facts are the properties that all sessions of an engine must agree on.
type facts struct {
	namespace  *kv.Namespace
	localRanks uint32
	firstRank  uint32 // first rank on this node
	pieces     uint64 // pieces that make an entry complete on this node, as bits
}

// agree returns an error if f differs from the facts of the engine's other sessions. The error names the first field that
// differs, and both values.
func (f *facts) agree(with *facts) error {
	disagree := func(field string, mine, theirs uint32) error {
		return faultf(proto.Code_CODE_DISAGREEMENT, field, "%q against %q of the engine's other sessions",
			strconv.FormatUint(uint64(mine), 10), strconv.FormatUint(uint64(theirs), 10))
	}
	switch {
	case f.localRanks != with.localRanks:
		return disagree("local_ranks", f.localRanks, with.localRanks)
	case f.firstRank != with.firstRank:
		return faultf(proto.Code_CODE_DISAGREEMENT, "rank",
			"this node's ranks start at %d, by the engine's other sessions at %d",
			f.firstRank, with.firstRank)
	case f.namespace.Units > 0 && f.namespace.TensorParallel != with.namespace.TensorParallel:
		return disagree("namespace.tensor_parallel", uint32(f.namespace.TensorParallel), uint32(with.namespace.TensorParallel))
	}
	if diff := f.namespace.Diff(with.namespace); diff != "" {
		return faultf(proto.Code_CODE_DISAGREEMENT, "namespace", "%s of the engine's other sessions", diff)
	}
	return nil
}

// place returns the first rank of this node and the pieces that its ranks store, as bits.
func place(ns *kv.Namespace, rank, local uint32) (first uint32, pieces uint64, err error) {
	ranks := uint32(max(1, ns.TensorParallel) * max(1, ns.ContextParallel) * max(1, ns.PipelineStages))
	switch {
	case rank >= ranks:
		return 0, 0, invalid("rank", "%d, the namespace's parallel sizes make %d ranks", rank, ranks)
	case local == 0 || local > kv.MaxRanks:
		return 0, 0, invalid("local_ranks", "%d, want 1 to %d", local, kv.MaxRanks)
	}
	first = rank / local * local
	if first+local > ranks {
		return 0, 0, invalid("local_ranks", "%d from rank %d on, the namespace's parallel sizes make %d ranks",
			local, first, ranks)
	}
	for r := first; r < first+local; r++ {
		from, count := ns.Pieces(r)
		for piece := from; piece < from+count; piece++ {
			pieces |= 1 << piece
		}
	}
	return first, pieces, nil
}

// request maps a request of the engine to its number in the store. Engines choose their request numbers freely, while the store
// counts its own.
type request struct {
	number   uint32
	hints    abi.Hints  // hints of the session that gave some last
	sessions []*granted // sessions that have named the request and not ended it
}

// requestNumbers allocates the store's numbers for the requests of all engines.
type requestNumbers struct{ last atomic.Uint32 }

// next returns a new number, which is never 0.
func (n *requestNumbers) next() uint32 {
	for {
		if number := n.last.Add(1); number != 0 {
			return number
		}
	}
}

// number returns the store's number of a request of this engine. It is 0 if id is 0.
func (e *servingEngine) number(g *granted, id uint32) (uint32, error) {
	if id == 0 {
		return 0, nil
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	r := e.requests[id]
	if r != nil && slices.Contains(r.sessions, g) {
		return r.number, nil
	}
	if limit := g.limits.Requests; len(g.requests) >= limit {
		return 0, faultf(proto.Code_CODE_LIMIT, "request",
			"%d requests of this session are not ended, END_REQUEST is due", limit)
	}
	if err := g.share.Take(budget.Requests, 1); err != nil {
		return 0, err
	}
	if r == nil {
		r = &request{number: e.numbers.next()}
		e.requests[id] = r
	}
	r.sessions = append(r.sessions, g)
	g.requests[id] = struct{}{}
	return r.number, nil
}

// endRequest ends a request for one session. The returned function ends it in the store if this was the last session, and does
// nothing otherwise.
func (e *servingEngine) endRequest(g *granted, id uint32, hints abi.Hints) func() {
	e.mu.Lock()
	r := e.requests[id]
	if r == nil || !slices.Contains(r.sessions, g) {
		e.mu.Unlock()
		return func() {}
	}
	if hints != (abi.Hints{}) {
		r.hints = hints
	}
	delete(g.requests, id)
	g.share.Give(budget.Requests, 1)
	r.sessions = slices.DeleteFunc(r.sessions, func(o *granted) bool { return o == g })
	last := len(r.sessions) == 0
	if last {
		delete(e.requests, id)
	}
	e.mu.Unlock()
	if !last {
		return func() {}
	}
	return func() { e.ended(r.number, r.hints) }
}

// requestsOf lists the requests that a session has not ended.
func (e *servingEngine) requestsOf(g *granted) []uint32 {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Sorted(maps.Keys(g.requests))
}

// grant registers a lease with hits and returns its number.
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

// find returns a lease by its number. A missing number is over if it was granted once, and unknown otherwise.
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

// leased returns the group that a lease's number names, or nil if there is no such group.
func (e *servingEngine) leased(id uint64) *kv.Group {
	groups := e.facts.namespace.Groups
	if place := id & (1<<groupBits - 1); place < uint64(len(groups)) {
		return &groups[place]
	}
	return nil
}

// peek returns a lease without using it up.
func (e *servingEngine) peek(id uint64) (*sharedLease, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.find(id)
}

// take marks a lease as used by one reader, which then may load. The caller must call loaded after the load.
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

// loaded ends the load of one reader.
func (e *servingEngine) loaded(l *sharedLease) {
	e.mu.Lock()
	l.loading--
	last := l.loading == 0 && l.readers == 0
	e.mu.Unlock()
	if last {
		l.release()
	}
}

// endLease releases or expires a lease. No further load starts. Running loads keep the pins until they end.
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

// remove removes a lease from the table.
func (e *servingEngine) remove(l *sharedLease) {
	l.timer.Stop()
	delete(e.leases, l.id)
	l.older.younger, l.younger.older = l.younger, l.older
	l.owner.leases--
}

// enlist inserts a lease as the youngest into the ring.
func (e *servingEngine) enlist(l *sharedLease) {
	if e.byAge.younger == nil {
		e.byAge.older, e.byAge.younger = &e.byAge, &e.byAge
	}
	l.older, l.younger = e.byAge.older, &e.byAge
	l.older.younger, e.byAge.older = l, l
}

// endLeases ends the leases that a session holds for one request, or all of them.
func (e *servingEngine) endLeases(g *granted, request uint32, all bool) {
	e.mu.Lock()
	var list []*sharedLease
	for _, l := range e.leases {
		if l.owner == g && (all || l.request == request) {
			list = append(list, l)
		}
	}
	e.mu.Unlock()
	// in order, because policies observe the unpins
	slices.SortFunc(list, func(a, b *sharedLease) int { return cmp.Compare(a.id, b.id) })
	for _, l := range list {
		e.endLease(l)
	}
}
