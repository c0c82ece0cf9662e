package store

import (
	"fmt"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/chunk"
)

// LookupRequest asks for entries of one group.
type LookupRequest struct {
	Space   *Space
	Group   uint32
	Keys    []chunk.Key
	Ranks   uint64 // the pieces that are needed, one bit per rank; 0: all ranks of the namespace
	Request uint32 // 0: none
	Tenant  uint32
}

// Lookup grants a lease on the entries that are there with all the pieces needed: the run from the first key on, or, in
// a group that is looked up by membership, each one. Every entry granted is pinned until the lease is released. A lease
// without hits is given too.
func (s *Store) Lookup(q LookupRequest) (*Lease, error) {
	if s.closed.Load() {
		return nil, ErrClosed
	}
	c, err := q.Space.class(q.Group)
	if err != nil {
		return nil, err
	}
	if q.Ranks == 0 {
		q.Ranks = c.ranks
	}
	l := &Lease{store: s, grants: make([]grant, 0, len(q.Keys))}
	w := walk{store: s, class: c, request: q.Request, ranks: q.Ranks, touched: s.requests.before(q.Request), now: s.clock()}
	w.shadows = s.listener(&q, c, w.now)
	asked := 0
	for i := range q.Keys {
		if i%warmed == 0 {
			w.warm(q.Keys[i:min(i+warmed, len(q.Keys))])
		}
		w.index = i
		g, ok := w.grant(i%warmed, &q.Keys[i])
		asked++
		if ok {
			l.hits++
		} else if c.lookup == chunk.ByPrefix {
			break
		}
		l.grants = append(l.grants, g)
	}
	w.leave()
	if w.shadows.batch != nil {
		w.shadows.rest(c, q.Keys[asked:])
	}
	if len(l.grants) < cap(l.grants)/2 {
		l.grants = append([]grant(nil), l.grants...) // a lease, and its request, may last
	}
	s.lookups.Add(1)
	s.keys.Add(uint64(len(q.Keys)))
	s.hits.Add(uint64(l.hits))
	if w.fresh {
		s.requests.after(q.Request, l.grants)
	}
	return l, nil
}

func (sp *Space) class(group uint32) (*class, error) {
	if sp == nil {
		return nil, fmt.Errorf("%w: no namespace", ErrSpace)
	}
	c := sp.ns.class(group)
	if c == nil || c.plan == nil {
		return nil, fmt.Errorf("%w: group %d", ErrSpace, group)
	}
	return c, nil
}

// hold is class with a reference, for who makes an entry of it.
func (sp *Space) hold(group uint32) (*class, error) {
	for {
		c, err := sp.class(group)
		if err != nil || c.hold() {
			return c, err
		}
	}
}

// walk goes through a lookup's keys with the lock of the root where the last one was found: the next is there too.
type walk struct {
	store   *Store
	class   *class
	request uint32
	ranks   uint64
	touched visited
	index   int  // of the key whose turn it is
	fresh   bool // something was touched for the first time by this request
	now     uint64
	at      int // the root that is locked, if locked
	locked  bool
	prints  [warmed]uint64 // of the keys that come next
	likely  [warmed]uint32 // their slots in the root called at, as far as one can say early; none
	warmAt  int            // the root that likely is of
	sink    byte
	shadows listener
}

// warmed is how many keys are hashed, and what the index has on them read, ahead of their turn: a lookup waits for
// memory, and so it waits once for several.
const warmed = 16

func (w *walk) warm(list []chunk.Key) {
	w.enter()
	for i := range list {
		w.prints[i] = chunk.Fingerprint(w.class.ns.digest, w.class.group, list[i])
	}
	w.sink ^= w.store.roots[w.at].x.warm(w.prints[:len(list)], w.likely[:])
	w.warmAt = w.at
}

// grant pins and touches the entry of the i-th of the warm keys, wherever it is.
func (w *walk) grant(i int, k *chunk.Key) (grant, bool) {
	print := w.prints[i]
	if print == 0 {
		return grant{slot: none}, false
	}
	roots := w.store.roots
	for range roots {
		w.enter()
		r, likely := roots[w.at], none
		if w.at == w.warmAt {
			likely = w.likely[i]
		}
		if slot := r.x.findWarm(likely, print, w.class.base, k); slot != none && r.serves(slot, w) {
			r.touch(slot, print, w)
			if w.shadows.batch != nil {
				w.shadows.hit(r, slot, print)
			}
			return grant{print: print, slot: slot, root: uint32(w.at)}, true
		}
		if len(roots) > 1 {
			w.leave()
			w.at = (w.at + 1) % len(roots)
		}
	}
	if w.shadows.batch != nil {
		w.shadows.miss(print)
	}
	return grant{slot: none}, false
}

func (w *walk) enter() {
	if !w.locked {
		w.store.roots[w.at].mu.Lock()
		w.locked = true
	}
}

func (w *walk) leave() {
	if w.locked {
		w.store.roots[w.at].mu.Unlock()
		w.locked = false
	}
}

// serves says whether an entry can be granted.
func (r *root) serves(slot uint32, w *walk) bool {
	e := r.x.at(slot)
	if e.is(stLeaving) || !r.serving() || r.fellows != nil && !r.fellows.member.Fresh() || r.x.piecesOf(slot, e)&w.ranks != w.ranks {
		return false
	}
	return len(r.expiries.chunks) == 0 || !r.expired(slot, r.store.start.Add(time.Duration(w.now)))
}

// touch makes an entry the most recent and pins it.
func (r *root) touch(slot uint32, print uint64, w *walk) {
	e := r.x.at(slot)
	ev := abi.Event{
		Slot: slot, Parent: none, Key: print, ParentKey: e.parentPrint(), Size: r.x.unitsOf(slot, e), Depth: e.depth(),
		Request: w.request, Tenant: r.tenantOf(slot), Op: abi.OpTouch, Time: w.now,
	}
	if !w.touched.has(w.index, print) {
		w.fresh = true
		r.x.touch(slot)
		r.send(ev)
		if r.fellows != nil {
			r.fellows.member.Touch(print)
		}
	}
	if r.x.pin(slot) {
		ev.Op = abi.OpPin
		r.send(ev)
	}
}
