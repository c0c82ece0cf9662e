package store

import (
	"fmt"
	"slices"
	"sync"

	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/internal/store/moves"
)

// Lease pins the entries that a lookup found. It is safe for concurrent use.
type Lease struct {
	store  *Store
	share  Share // nil unless another host holds the lease
	hits   int
	bytes  int64
	scarce bool
	short  bool
	grants []grant           // by key; the slot is None if the key was not granted
	found  [MaxLevels]uint32 // hits by level, nearest first

	mu     sync.Mutex
	over   bool
	loaded bool                 // a piece was opened
	hit    bool                 // counts as a hit, and no later lookup of the same request continues from it
	near   map[int]grant        // copies nearer than those in grants, by key
	coming map[int]*moves.Entry // copies that the lookup has requested, by key
}

// Hits returns the number of leading keys that were found. In a group that is looked up by membership, it returns the number of
// entries that were found.
func (l *Lease) Hits() int { return l.hits }

// Has reports whether the i-th key was granted.
func (l *Lease) Has(i int) bool { return i >= 0 && i < len(l.grants) && l.grants[i].Slot != index.None }

// Root returns the path of the root in which the i-th key was granted. It is empty if the key was not granted.
func (l *Lease) Root(i int) string {
	if !l.Has(i) {
		return ""
	}
	return l.store.roots[l.granted(i).Root].Path
}

// Holds returns the size of the granted entries. scarce is true if pinned entries used more than three quarters of one of their
// roots, so that new entries must find room in the rest.
func (l *Lease) Holds() (bytes int64, scarce bool) { return l.bytes, l.scarce }

// Short reports whether the lookup found entries that [PinShare] or [TenantShare] kept it from granting.
func (l *Lease) Short() bool { return l.short }

// Seen is a set of entries.
type Seen struct{ roots [][]uint64 } // a bit for each slot

// Unseen adds the lease's entries to the set, and returns the size of those that were not in it. It assumes that all entries
// have the same size.
func (l *Lease) Unseen(s *Seen) int64 {
	n := 0
	for _, g := range l.grants {
		if g.Slot == index.None {
			continue
		}
		for len(s.roots) <= int(g.Root) {
			s.roots = append(s.roots, nil)
		}
		bits, word := &s.roots[g.Root], int(g.Slot/64)
		if word >= len(*bits) {
			*bits = append(*bits, make([]uint64, word+1-len(*bits))...)
		}
		if mask := uint64(1) << (g.Slot % 64); (*bits)[word]&mask == 0 {
			(*bits)[word] |= mask
			n++
		}
	}
	return int64(n) * l.bytes / int64(max(1, l.hits))
}

// Place is a root in which a lookup found keys.
type Place struct {
	Root  string
	Level int
	Hits  int
}

// Places appends the roots in which the lookup found keys, nearest first.
func (l *Lease) Places(list []Place) []Place {
	l.leads(list, func(_ int, all []Place) { list = all })
	slices.SortStableFunc(list, func(a, b Place) int { return a.Level - b.Level })
	return list
}

// mostLeads bounds the calls of yield by Leads: neighbouring keys may be in alternating roots.
const mostLeads = 16

// Leads calls yield with numbers of leading keys after which the root changes, and the places of those keys.
func (l *Lease) Leads(list []Place, yield func(keys int, places []Place)) {
	last := 0
	l.leads(list, func(keys int, places []Place) {
		if keys < len(l.grants) && keys-last >= len(l.grants)/mostLeads {
			last = keys
			yield(keys, places)
		}
	})
}

// leads calls yield wherever the root changes, and at the end.
func (l *Lease) leads(list []Place, yield func(keys int, places []Place)) {
	root, at := index.None, 0
	for i := range l.grants {
		g := &l.grants[i]
		if g.Slot == index.None {
			continue
		}
		if g.Root != root {
			if root != index.None {
				yield(i, list)
			}
			root = g.Root
			r := l.store.roots[root]
			if at = slices.IndexFunc(list, func(p Place) bool { return p.Root == r.Path }); at < 0 {
				at, list = len(list), append(list, Place{Root: r.Path, Level: r.level.number})
			}
		}
		list[at].Hits++
	}
	yield(len(l.grants), list)
}

// granted returns the nearest copy that the lease has pinned.
func (l *Lease) granted(i int) grant {
	l.mu.Lock()
	defer l.mu.Unlock()
	if g, ok := l.near[i]; ok {
		return g
	}
	return l.grants[i]
}

// Release ends the pins. Open pieces stay usable until they are closed.
func (l *Lease) Release() {
	l.mu.Lock()
	over, loaded, hit, near, coming := l.over, l.loaded, l.hit, l.near, l.coming
	l.over, l.near, l.coming = true, nil, nil
	l.mu.Unlock()
	if over {
		return
	}
	now := l.store.seq.Clock()
	for _, g := range near {
		r := l.store.roots[g.Root]
		r.Lock()
		r.UnpinAt(g.Slot, g.Fingerprint, now)
		r.Unlock()
	}
	l.endPrefetch(coming)
	if loaded || hit {
		l.promote(loaded)
	}
	at := index.None
	for _, g := range l.grants {
		if g.Slot == index.None {
			continue
		}
		if g.Root != at {
			if at != index.None {
				l.store.roots[at].Unlock()
			}
			at = g.Root
			l.store.roots[at].Lock()
		}
		l.store.roots[at].UnpinAt(g.Slot, g.Fingerprint, now)
		if l.share != nil {
			l.share.Give(at, g.Slot)
		}
	}
	if at != index.None {
		l.store.roots[at].Unlock()
	}
}

// chosen returns the lease's copy of the i-th key that is nearer than the granted one, if there is one. A copy that is still
// being made is cancelled, since the load does not wait for it.
func (l *Lease) chosen(i int) (near grant, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if near, ok = l.near[i]; !ok {
		if v := l.coming[i]; v != nil {
			v.Cancel()
		}
	}
	return near, ok
}

// Open opens a piece of the i-th key for reading. The caller must close it.
func (l *Lease) Open(i int, rank uint32) (*Piece, error) {
	if !l.Has(i) {
		return nil, fmt.Errorf("%w: it does not cover key %d", ErrLeaseOver, i)
	}
	if near, ok := l.chosen(i); ok {
		if p, err := l.open(near, rank); err == nil {
			return p, nil
		}
	}
	return l.open(l.grants[i], rank)
}

func (l *Lease) open(g grant, rank uint32) (*Piece, error) {
	p, err := l.hold(g, rank, true)
	if err != nil {
		return nil, err
	}
	if err := p.open(); err != nil {
		p.Close()
		return nil, err
	}
	p.root.level.loaded.Add(uint64(p.size))
	p.isLoad = true
	l.store.loads.Begin()
	return p, nil
}

// hold pins the entry of a piece unless the lease has ended.
func (l *Lease) hold(g grant, rank uint32, loads bool) (*Piece, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.over {
		return nil, ErrLeaseOver
	}
	l.loaded = l.loaded || loads
	p := &Piece{root: l.store.roots[g.Root], mark: entries.Mark{Slot: g.Slot, Fingerprint: g.Fingerprint}, rank: rank}
	return p, p.pin()
}

// Share limits the entries of this host's roots that another host may lease. Its methods are called with the root's lock held.
type Share interface {
	// Take records one more lease of an entry, or refuses it. most is the number of entries of the root that leases may have,
	// and left is the unused part of it. With most 0 it must not refuse, because the entry is leased already or leases have few
	// entries.
	Take(root, slot uint32, most, left int) bool
	// Give ends the record of one lease.
	Give(root, slot uint32)
}

// offer offers a copy of the i-th entry of a lease to the nearest level. It returns nil if the entry is there already, is being
// moved, or is not taken.
func (l *Lease) offer(i int, kind moves.Kind) *moves.Entry {
	nearest, g := l.store.levels[0], l.grants[i]
	if g.Slot == index.None || l.store.roots[g.Root].level == nearest {
		return nil
	}
	r := l.store.roots[g.Root]
	r.Lock()
	m := r.Moves.Copy(g.Slot)
	r.Unlock()
	if m == nil {
		return nil
	}
	v := &moves.Entry{Move: m, Kind: kind, From: &r.origin, To: nearest}
	if kind == moves.Prefetch {
		v.Then = func() { l.came(i, nearest, true) }
	}
	if !v.Offer(l.store.mover) {
		return nil
	}
	return v
}

// promote offers copies of a lease's entries when the lease ends. Entries from farther levels are offered to the nearest level,
// even if loading them from there was no faster than computing them. Loaded entries of the nearest level are offered to the
// next one. The lease still holds its pins.
func (l *Lease) promote(loaded bool) {
	if len(l.store.levels) < 2 {
		return
	}
	for i, g := range l.grants {
		if g.Slot == index.None {
			continue
		}
		if r := l.store.roots[g.Root]; r.level != l.store.levels[0] {
			l.offer(i, moves.Promotion)
		} else if loaded {
			r.keep(entries.Mark{Slot: g.Slot, Fingerprint: g.Fingerprint}, WriteHits)
		}
	}
}

// prefetch requests copies in the nearest level of a new lease's entries in farther levels. The lease switches to each copy
// when it has arrived, and until then loads the entry from where it was found.
func (l *Lease) prefetch() {
	for i := range l.grants {
		v := l.offer(i, moves.Prefetch)
		if v == nil {
			continue
		}
		l.mu.Lock()
		if l.coming == nil {
			l.coming = map[int]*moves.Entry{}
		}
		l.coming[i] = v
		l.mu.Unlock()
	}
}

// endPrefetch cancels the copies that have not arrived.
func (l *Lease) endPrefetch(coming map[int]*moves.Entry) {
	if len(coming) == 0 {
		return
	}
	for _, v := range coming {
		v.Cancel()
	}
	l.store.mover.Prune()
}

// came pins a copy of the i-th entry in a level for the lease, unless the lease has ended or has a nearer copy. It reports
// whether it did.
func (l *Lease) came(i int, to *level, prefetched bool) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if prefetched {
		delete(l.coming, i)
	}
	_, has := l.near[i]
	fp := l.grants[i].Fingerprint
	for _, place := range to.places {
		r := l.store.roots[place]
		if slot, pinned := r.PinCopy(fp, prefetched, !l.over && !has); pinned {
			if l.near == nil {
				l.near = map[int]grant{}
			}
			l.near[i] = grant{Fingerprint: fp, Slot: slot, Root: place}
			return true
		}
	}
	return false
}

// Approach pins the nearest complete copy of the i-th entry, which may have come nearer since the lookup. A load calls it
// before it opens the pieces. Afterwards Root returns the root from which they are read, and Open does not search the levels.
func (l *Lease) Approach(i int) {
	if len(l.store.levels) < 2 || !l.Has(i) {
		return
	}
	at := l.store.roots[l.granted(i).Root].level
	for _, level := range l.store.levels {
		if level == at || l.came(i, level, false) {
			return
		}
	}
}
