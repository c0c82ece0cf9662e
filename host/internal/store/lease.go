package store

import (
	"fmt"
	"sync"

	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/internal/store/moves"
)

// Lease is a pin on the entries that a lookup found. It is safe for concurrent use.
type Lease struct {
	store  *Store
	hits   int
	bytes  int64
	scarce bool
	short  bool
	grants []grant           // by key; a slot of none was not granted
	found  [MaxLevels]uint32 // hits by level, nearest first

	mu     sync.Mutex
	over   bool
	loaded bool                 // something was opened
	hit    bool                 // it counts as a hit, and no other lookup goes on from it
	near   map[int]grant        // nearer copies than those granted, by key
	coming map[int]*moves.Entry // copies that the lookup has asked for, by key
}

// Hits is the length of the run that was found, or the number of entries where the group is looked up by membership.
func (l *Lease) Hits() int { return l.hits }

// Has says whether the i-th key was granted.
func (l *Lease) Has(i int) bool { return i >= 0 && i < len(l.grants) && l.grants[i].Slot != index.None }

// Root is the directory of the root where the i-th key was granted, or empty.
func (l *Lease) Root(i int) string {
	if !l.Has(i) {
		return ""
	}
	return l.store.roots[l.granted(i).Root].Path
}

// Holds is the size of the entries that were found. It is scarce if entries with pins had more than three quarters of one of their
// roots: what is stored there has to find room in the rest.
func (l *Lease) Holds() (bytes int64, scarce bool) { return l.bytes, l.scarce }

// Short says that more is there than [PinShare] lets the lease have.
func (l *Lease) Short() bool { return l.short }

// Seen is a set of entries.
type Seen struct{ roots [][]uint64 } // a bit for each slot

// Unseen enters the lease's entries, and returns the size of those that were not in the set, if all are of one size.
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

// LevelHits is how many keys were found in a level.
type LevelHits struct{ Level, Hits int }

// Found appends the levels where the lookup found keys, nearest first.
func (l *Lease) Found(list []LevelHits) []LevelHits {
	for n, hits := range l.found {
		if hits > 0 {
			list = append(list, LevelHits{l.store.levels[n].number, int(hits)})
		}
	}
	return list
}

// Sample lists the roots of some of the keys that were found in a level, evenly among them. It returns how many.
func (l *Lease) Sample(in LevelHits, roots []string) (n int) {
	step, at := max(1, in.Hits/len(roots)), 0
	for _, g := range l.grants {
		if n == len(roots) || g.Slot == index.None || l.store.roots[g.Root].level.number != in.Level {
			continue
		}
		if at == n*step+n%step { // not in step with roots that take turns
			roots[n] = l.store.roots[g.Root].Path
			n++
		}
		at++
	}
	return n
}

// granted is the nearest copy that the lease has.
func (l *Lease) granted(i int) grant {
	l.mu.Lock()
	defer l.mu.Unlock()
	if g, ok := l.near[i]; ok {
		return g
	}
	return l.grants[i]
}

// Release gives the pins back. Pieces that are open stay usable until they are closed.
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
	}
	if at != index.None {
		l.store.roots[at].Unlock()
	}
}

// chosen is the copy of the i-th key nearer than the one granted, if the lease has one. A copy that is being made is not
// waited for, and not wanted any more.
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

// Open opens the piece of the i-th key for reading. The caller closes it.
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
	p := &Piece{root: l.store.roots[g.Root], mark: entries.Mark{Slot: g.Slot, Fingerprint: g.Fingerprint}, rank: rank}
	if err := l.hold(p); err != nil {
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

// hold pins a piece's entry while the lease still has one.
func (l *Lease) hold(p *Piece) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.over {
		return ErrLeaseOver
	}
	l.loaded = true
	return p.pin()
}
