package store

import (
	"github.com/kvhost/kvhost/host/internal/policy/shadow"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/evictor"
	"github.com/kvhost/kvhost/host/kv"
)

// LookupRequest asks for entries of one group.
type LookupRequest struct {
	Namespace *catalog.Namespace
	Group     uint32
	Keys      []kv.Key
	Ranks     uint64 // the pieces that are needed, one bit per rank; 0: all ranks of the namespace
	Request   uint32 // 0: none
	Tenant    uint32
	Prefetch  bool // copy to the nearest level what is granted from farther away
}

// Lookup grants a lease on the entries that are there with all the pieces needed: the run from the first key on, or, in
// a group that is looked up by membership, each one. Every entry granted is pinned until the lease is released. A lease
// without hits is given too.
func (s *Store) Lookup(q LookupRequest) (*Lease, error) {
	if s.closed.Load() {
		return nil, ErrClosed
	}
	c, err := q.Namespace.OpenClass(q.Group)
	if err != nil {
		return nil, err
	}
	if q.Ranks == 0 {
		q.Ranks = c.Ranks
	}
	l := &Lease{store: s, grants: make([]grant, 0, len(q.Keys))}
	w := walk{store: s, class: c, keys: q.Keys, ranks: q.Ranks, touches: s.requests.Begin(q.Request)}
	w.cause = evictor.Cause{Request: q.Request, Time: s.seq.Clock()}
	w.shadows = s.shadows.Lookup(shadow.Step{
		Time: w.cause.Time, Request: q.Request, Tenant: q.Tenant, ByPrefix: c.Lookup == kv.ByPrefix,
	})
	asked := 0
	for i := range q.Keys {
		l.grants = l.grants[:i+1]
		asked++
		if w.grant(i, &l.grants[i]) {
			l.hits++
		} else if c.Lookup == kv.ByPrefix {
			l.grants = l.grants[:i]
			break
		}
	}
	w.leave()
	if w.shadows.On() {
		w.endShadows(q.Keys[asked:])
	}
	if len(l.grants) < cap(l.grants)/2 {
		l.grants = append([]grant(nil), l.grants...) // a lease, and its request, may last
	}
	for n, level := range s.levels {
		if w.hits[n] > 0 {
			level.hits.Add(w.hits[n])
			l.found[n] = uint32(w.hits[n])
		}
	}
	if q.Prefetch && len(s.levels) > 1 {
		l.prefetch()
	}
	s.count.lookups.Add(1)
	s.count.keys.Add(uint64(len(q.Keys)))
	s.count.hits.Add(uint64(l.hits))
	s.requests.Keep(q.Request, &w.touches, l.grants)
	return l, nil
}
