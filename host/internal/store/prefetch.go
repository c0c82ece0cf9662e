package store

import (
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/internal/store/moves"
)

// offer offers a copy of the i-th entry of a lease to the nearest level, unless it is from there, or moves already.
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

// promote offers what a lease has loaded from farther levels to the nearest one. The pins are still the lease's.
func (l *Lease) promote() {
	if len(l.store.levels) < 2 {
		return
	}
	for i := range l.grants {
		l.offer(i, moves.Promotion)
	}
}

// prefetch asks for copies in the nearest level of what a new lease has in farther ones. The lease gets each when it is
// there, and loads what has no copy yet from where it was found.
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

// endPrefetch cancels the copies that have not come.
func (l *Lease) endPrefetch(coming map[int]*moves.Entry) {
	if len(coming) == 0 {
		return
	}
	for _, v := range coming {
		v.Cancel()
	}
	l.store.mover.Prune()
}

// came pins a copy of the i-th entry in a level for the lease, while that lasts and has no nearer one. It says whether it
// did.
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

// Approach pins the nearest whole copy of the i-th entry, which may have come nearer since the lookup. A load calls it
// before it opens its pieces: that Root says where they are read, and no Open looks through the levels.
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
