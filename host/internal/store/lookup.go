package store

import (
	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy/shadow"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/evictor"
	"github.com/kvhost/kvhost/host/internal/store/index"
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
	Pin       bool // only to keep what is there: no hit and no touch, and at most PinShare of a root
	// lend is the share of the other host that asks, if one does: no hit, at most PinShare of a root, and only what this host has near.
	lend Share
	// Leading is for [Store.Lend]: a run from the first key on, whatever the group is looked up by.
	Leading bool
	// After is the lease of a first lookup with the same request, since which more may be there. It is released.
	After *Lease
}

// Share is what another host has of this one's roots under leases. Its methods are called with the root's lock held.
type Share interface {
	// Take takes an entry for one more lease, or refuses it. Leases may have most entries of the root, of which so many are left. With most 0 it
	// refuses none: other leases have the entry, or leases have few.
	Take(root, slot uint32, most, left int) bool
	// Give ends that of one lease.
	Give(root, slot uint32)
}

// PinShare is the part of a root where lookups to pin find nothing more that no lease has: the rest is for what is stored next.
const PinShare = 0.5

// TenantShare is the part of a root that entries of one tenant may have under leases where there are several: a lookup finds no more of
// them. Nor does it find any that no lease has where those that have one take as much as they leave, or, for others than their tenant, half
// as much.
const TenantShare = 0.5

// Lookup grants a lease on the entries that are there with all the pieces needed: the run from the first key on, or, in
// a group that is looked up by membership, each one. Every entry granted is pinned until the lease is released. A lease
// without hits is given too.
func (s *Store) Lookup(q LookupRequest) (*Lease, error) {
	if s.closed.Load() {
		return nil, ErrClosed
	}
	c, err := q.Namespace.OpenClass(q.Group)
	if q.lend != nil { // no session here need have opened it
		c, err = q.Namespace.Class(q.Group), nil
	}
	if err != nil {
		return nil, err
	}
	if q.Ranks == 0 {
		q.Ranks = c.Ranks
	}
	l := &Lease{store: s, share: q.lend, grants: make([]grant, 0, len(q.Keys))}
	byPrefix := c.Lookup == kv.ByPrefix
	w := walk{
		wanted: wanted{class: c, keys: q.Keys, ranks: q.Ranks, pin: q.Pin, bounded: q.Pin || q.lend != nil,
			share: q.lend, several: s.catalog.Tenants.Several(), tenant: q.Tenant, again: q.After != nil},
		standing: standing{store: s, levels: s.levels}, lease: l, touches: s.requests.Begin(q.Request),
	}
	if q.lend != nil {
		w.levels, byPrefix = s.lent, q.Leading
	}
	w.cause = evictor.Cause{Request: q.Request, Time: s.seq.Clock()}
	if !w.bounded && q.After == nil {
		w.shadows = s.shadows.Lookup(shadow.Step{
			Time: w.cause.Time, Request: q.Request, Tenant: q.Tenant, ByPrefix: byPrefix,
		})
	}
	asked := 0
	for i := range q.Keys {
		l.grants = l.grants[:i+1]
		asked++
		if w.grant(i, &l.grants[i]) {
			l.hits++
		} else if byPrefix {
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
	if q.After != nil { // before the prefetch: an entry has one copy under way, which this cancels
		q.After.mu.Lock()
		q.After.hit = false
		q.After.mu.Unlock()
		q.After.Release()
	}
	if q.Prefetch && len(s.levels) > 1 {
		l.prefetch()
	}
	if w.bounded {
		return l, nil
	}
	l.hit = true
	s.counted(l, q.After, len(q.Keys))
	s.requests.Keep(q.Request, &w.touches, l.grants)
	return l, nil
}

// counted counts a lookup, or what more it found than the first one of its request.
func (s *Store) counted(l, first *Lease, keys int) {
	if first == nil {
		s.count.lookups.Add(1)
		s.count.keys.Add(uint64(keys))
		first = &Lease{}
	}
	for n, level := range s.levels {
		level.hits.Add(uint64(max(l.found[n], first.found[n]) - first.found[n]))
	}
	s.count.hits.Add(uint64(max(l.hits, first.hits) - first.hits))
}

// Has says whether an entry is in an own root.
func (s *Store) Has(fp uint64) bool { return holds(s.ours(), fp, index.Complete) }

// walk goes through a lookup's keys, for each from the nearest level on, and enters in the lease what it finds.
type walk struct {
	wanted
	standing
	lease   *Lease
	touches touchLog
	shadows shadow.Lookup
	cause   evictor.Cause // the events' cause, with the tenant of the entry that was met last
	ahead   index.Prefetch
}

// wanted is what a walk looks for.
type wanted struct {
	class   *catalog.Class
	keys    []kv.Key
	ranks   uint64
	pin     bool // no hit and no touch
	bounded bool // to PinShare
	share   Share
	several bool // tenants, see TenantShare
	again   bool // after another lease of the same request
	tenant  uint32
}

// standing is the root that a walk looks at, with its lock. Keys that follow each other are in one root most of the time, so the walk
// begins each key there and keeps the lock while it stays.
type standing struct {
	store   *Store
	levels  []*level
	last    [MaxLevels]int // in each level, the root where the last key was found
	at      int            // the root that is locked
	locked  bool
	grants  bool   // the root lets lookups grant its entries
	owner   uint32 // the owner of the entry that was met last in the root
	fits    bool   // entries of that owner are of the class
	seconds int64  // the time of day, once it was asked for
}

// grant pins and touches the entry of the i-th key, wherever it is.
func (w *walk) grant(i int, g *grant) bool {
	if i%index.PrefetchStep == 0 {
		w.seek(0)
		w.ahead.Run(w.store.roots[w.at].Index, w.at, &w.class.Printer, w.keys, i)
	}
	g.Slot = index.None
	fp := w.ahead.Fingerprint(i)
	if fp == 0 {
		return false
	}
	for n, level := range w.levels {
		for range level.roots {
			if !w.locked || w.at != int(level.places[w.last[n]]) {
				w.seek(n)
			}
			r := w.store.roots[w.at]
			slot, e := w.find(r, w.ahead.Likely(w.at, i), fp, &w.keys[i])
			if e != nil && (w.several && !w.shares(r, e) || w.bounded && !w.bound(r, slot, e)) {
				w.lease.short, e = true, nil
			}
			if e != nil {
				w.touch(r, i, slot, e, fp)
				units := r.Index.EntryUnits(slot, e)
				if w.shadows.On() {
					w.shadows.Hit(fp, e.Parent(), units, e.Depth())
				}
				w.lease.found[n]++
				w.lease.bytes += int64(units) * abi.SizeUnit
				*g = grant{Fingerprint: fp, Slot: slot, Root: uint32(w.at)}
				return true
			}
			if len(level.roots) > 1 {
				w.last[n] = (w.last[n] + 1) % len(level.roots)
			}
		}
	}
	if w.shadows.On() {
		w.shadows.Miss(fp)
	}
	return false
}

// seek goes to the root of a level where the last key was found, and locks it.
func (w *walk) seek(n int) {
	at := int(w.levels[n].places[w.last[n]])
	if w.at == at && w.locked {
		return
	}
	w.leave()
	r := w.store.roots[at]
	r.Lock()
	w.at, w.locked, w.owner = at, true, index.MaxOwners
	w.grants = r.Health.Serves() && r.owner.grants()
}

// second is the time of day in seconds since 1970, by which entries expire. The clock of events counts from the store's start.
func (w *standing) second() int64 {
	if w.seconds == 0 {
		w.seconds = w.store.cfg.Now().Unix()
	}
	return w.seconds
}

func (w *walk) leave() {
	if w.locked {
		r := w.store.roots[w.at]
		w.lease.scarce = w.lease.scarce || 2*r.Index.Held() > r.Index.Len() && r.leased() > 0.75
		r.Unlock()
		w.locked = false
	}
}

// leased is the part of the root that entries with pins have, if all are of one size. The lock is held.
func (r *root) leased() float64 { return r.part(r.Index.Held()) }

// part is the part of the root that so many entries have.
func (r *root) part(entries uint32) float64 {
	return float64(entries) / float64(max(1, r.Index.Len())) * r.Account.Taken()
}

// shares says whether an entry leaves others their part of the root. It is of owner.
func (w *walk) shares(r *root, e *index.Entry) bool {
	held, all := r.Index.HeldOf(r.Index.Owners()[w.owner].Tenant), r.Index.Len()
	if 8*held < all && 2*r.Index.Held() < all { // whatever they take
		return true
	}
	its, left, none := r.part(held), 1-r.leased(), e.Pins() == 0
	switch {
	case !none && w.again: // the lease before this one has it
		return true
	case w.cause.Tenant != w.tenant:
		return !none || its < left/2
	}
	return its <= TenantShare && (!none || its < left)
}

// bound says whether an entry is within [PinShare], and within what another host may have of that.
func (w *walk) bound(r *root, slot uint32, e *index.Entry) bool {
	leased, most, left := r.leased(), 0, 0
	if e.Pins() == 0 {
		if leased >= PinShare {
			return false
		}
		if leased >= PinShare/4 {
			most, left = r.entries(PinShare), r.entries(PinShare-leased)
			if w.several { // until shares finds no more
				left = min(left, r.entries(((1-leased)/2-r.part(r.Index.HeldOf(r.Index.Owners()[w.owner].Tenant)))/1.5))
			}
		}
	}
	return w.share == nil || w.share.Take(uint32(w.at), slot, most, left)
}

// entries is how many entries have so much of the root.
func (r *root) entries(part float64) int {
	return int(part * float64(r.Index.Len()) / r.Account.Taken())
}

// find gives an entry that can be granted, or nil.
func (w *walk) find(r *root, likely uint32, fp uint64, k *kv.Key) (uint32, *index.Entry) {
	x, slot := r.Index, likely
	var e *index.Entry
	if slot != index.None {
		e = x.Match(slot, k)
	}
	if e == nil || !w.isOf(r, e) || e.State()&(index.Live|index.Detached) != index.Live {
		if slot = x.Find(fp, w.class.Base, k); slot == index.None {
			return index.None, nil
		}
		e = x.At(slot)
		w.isOf(r, e)
	}
	if !w.grants || e.Is(index.Evicting) ||
		x.EntryPieces(slot, e)&w.ranks != w.ranks || x.Expiries.Any() && r.Expired(slot, w.second()) {
		return index.None, nil
	}
	return slot, e
}

// isOf says whether an entry is of the class, and finds its tenant. Nearly all of one lookup have the same owner.
func (w *walk) isOf(r *root, e *index.Entry) bool {
	if id := e.OwnerID(); id != w.owner {
		o, t := r.Index.Owners()[id], r.store.catalog
		w.owner, w.fits, w.cause.Tenant = id, r.Index.HasBase(e, w.class.Base), t.Tenants.Tenant(o.Tenant)
	}
	return w.fits
}

// touch makes an entry the most recent and pins it.
func (w *walk) touch(r *root, i int, slot uint32, e *index.Entry, fp uint64) {
	first := !w.pin && !w.touches.Has(i, fp)
	r.Moves.Granted(slot, e, first)
	if first {
		w.touches.touch(i)
		r.Index.TouchEntry(e)
		r.Evictor.Post(abi.OpTouch, slot, e, fp, &w.cause)
		if r.Touched != nil {
			r.Touched(fp)
		}
	}
	if r.Index.PinEntry(slot, e) {
		r.Evictor.Post(abi.OpPin, slot, e, fp, &w.cause)
	}
}

// endShadows passes on the keys after the first miss, which the lookup itself has no need to look at.
func (w *walk) endShadows(rest []kv.Key) {
	for i := range rest {
		w.shadows.Miss(kv.Fingerprint(w.class.Namespace.Digest, w.class.Group, rest[i]))
	}
	w.shadows.End()
}
