package store

import (
	"cmp"

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
	Ranks     uint64 // ranks of the needed pieces, as bits; 0 means all ranks of the namespace
	Request   uint32 // 0 if the lookup belongs to no request
	Tenant    uint32
	Prefetch  bool // copy entries that are granted in farther levels to the nearest one
	Pin       bool // only keep entries resident: no hit, no touch, and at most PinShare of a root
	// lend is the share of another host if the lookup is for that host. It then counts no hit, is limited to PinShare of a
	// root, and finds only entries in the lent levels.
	lend Share
	// Leading is for [Store.Lend]. It limits the lookup to the leading keys, even in a group that is looked up by membership.
	Leading bool
	// After is the lease of an earlier lookup for the same request, which is repeated because more entries may have arrived.
	// Lookup releases it.
	After *Lease
}

// PinShare is the part of a root up to which lookups with Pin grant entries without a lease. The rest stays available for new
// entries.
const PinShare = 0.5

// TenantShare is the part of a root that leases may hold of one tenant's entries if there are several tenants. Beyond it,
// lookups grant no further entries of the tenant. A further limit applies to entries without a lease: the tenant's leased
// entries must take less of the root than the part without leases, and less than half of that part if the lookup is another
// tenant's.
const TenantShare = 0.5

// Lookup grants a lease on the resident entries that have all needed pieces. These are the leading keys up to the first missing
// one or, in a group that is looked up by membership, each key. Every granted entry is pinned until the lease is released. A
// lookup without hits returns a lease, too.
func (s *Store) Lookup(q LookupRequest) (*Lease, error) {
	if s.closed.Load() {
		return nil, ErrClosed
	}
	c, err := q.Namespace.OpenClass(q.Group)
	if q.lend != nil { // no session of this host need have opened it
		c, err = q.Namespace.Class(q.Group), nil
	}
	if err != nil {
		return nil, err
	}
	q.Ranks = cmp.Or(q.Ranks, c.Ranks)
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
		l.grants = append([]grant(nil), l.grants...) // a lease may last, so it should not keep unused memory
	}
	if q.After != nil { // before the prefetch: an entry can have only one copy under way, and the release cancels it
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

// counted counts a lookup. For a repeated lookup it counts only the additional hits.
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

// Has reports whether an own root has a complete entry.
func (s *Store) Has(fp uint64) bool { return holds(s.ours(), fp, index.Complete) }

// walk visits the keys of a lookup and enters the found entries in the lease. It searches each key in the nearest level first.
type walk struct {
	wanted
	standing
	lease   *Lease
	touches touchLog
	shadows shadow.Lookup
	cause   evictor.Cause // cause of the events, with the tenant of the entry that was visited last
	ahead   index.Prefetch
}

// wanted is the description of the entries that a walk looks for.
type wanted struct {
	class   *catalog.Class
	keys    []kv.Key
	ranks   uint64
	pin     bool // no hit and no touch
	bounded bool // limited to PinShare
	share   Share
	several bool // there are several tenants: see TenantShare
	again   bool // an earlier lease of the same request exists
	tenant  uint32
}

// standing is the root that a walk has locked. Consecutive keys are usually in the same root, so the walk starts each key there
// and keeps the lock as long as it stays.
type standing struct {
	store   *Store
	levels  []*level
	last    [MaxLevels]int // by level: the root in which the last key was found
	at      int            // the locked root
	locked  bool
	grants  bool   // the root lets lookups grant its entries
	owner   uint32 // owner of the entry that was visited last in the root
	fits    bool   // entries of that owner belong to the wanted class
	seconds int64  // time of day, once it has been needed
}

// grant finds the entry of the i-th key, pins it and touches it.
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

// seek locks the root of a level in which the last key was found.
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

// second returns the time of day in seconds since 1970, for comparison with expiry times. The clock of events counts from the
// opening of the store.
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

// leased returns the part of the root that pinned entries use, assuming that all entries have the same size. The lock must be
// held.
func (r *root) leased() float64 { return r.part(r.Index.Held()) }

// part returns the fraction of the root that the given number of entries uses.
func (r *root) part(entries uint32) float64 {
	return float64(entries) / float64(max(1, r.Index.Len())) * r.Account.Taken()
}

// shares reports whether granting an entry leaves other tenants their part of the root: see [TenantShare]. w.owner must be the
// entry's owner.
func (w *walk) shares(r *root, e *index.Entry) bool {
	held, all := r.Index.HeldOf(r.Index.Owners()[w.owner].Tenant), r.Index.Len()
	if 8*held < all && 2*r.Index.Held() < all { // few entries are pinned, so the exact sizes do not matter
		return true
	}
	its, left, none := r.part(held), 1-r.leased(), e.Pins() == 0
	switch {
	case !none && w.again: // the lease of the earlier lookup has it
		return true
	case w.cause.Tenant != w.tenant:
		return !none || its < left/2
	}
	return its <= TenantShare && (!none || its < left)
}

// bound reports whether granting an entry is within [PinShare], and within the share of another host.
func (w *walk) bound(r *root, slot uint32, e *index.Entry) bool {
	leased, most, left := r.leased(), 0, 0
	if e.Pins() == 0 {
		if leased >= PinShare {
			return false
		}
		if leased >= PinShare/4 {
			most, left = r.entries(PinShare), r.entries(PinShare-leased)
			if w.several { // beyond this, shares refuses
				left = min(left, r.entries(((1-leased)/2-r.part(r.Index.HeldOf(r.Index.Owners()[w.owner].Tenant)))/1.5))
			}
		}
	}
	return w.share == nil || w.share.Take(uint32(w.at), slot, most, left)
}

// entries returns the number of entries that use a part of the root.
func (r *root) entries(part float64) int {
	return int(part * float64(r.Index.Len()) / r.Account.Taken())
}

// find returns an entry that can be granted, or nil.
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

// isOf reports whether an entry belongs to the wanted class, and determines its tenant. Nearly all entries of a lookup have the
// same owner.
func (w *walk) isOf(r *root, e *index.Entry) bool {
	if id := e.OwnerID(); id != w.owner {
		o, t := r.Index.Owners()[id], r.store.catalog
		w.owner, w.fits, w.cause.Tenant = id, r.Index.HasBase(e, w.class.Base), t.Tenants.Tenant(o.Tenant)
	}
	return w.fits
}

// touch makes an entry the most recently used and pins it.
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

// endShadows tells the shadows about the keys after the first miss, which the lookup itself does not search.
func (w *walk) endShadows(rest []kv.Key) {
	for i := range rest {
		w.shadows.Miss(kv.Fingerprint(w.class.Namespace.Digest, w.class.Group, rest[i]))
	}
	w.shadows.End()
}
