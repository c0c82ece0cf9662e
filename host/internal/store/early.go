package store

import (
	"sync"

	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/internal/store/moves"
)

// mostEarly is how many entries are remembered that came before their memory.
const mostEarly = 1 << 14

// earlies are the entries that a level would have if its memory had been there when they came. They come near as it comes.
type earlies struct {
	mu   sync.Mutex
	list []early // oldest first
}

type early struct {
	root *root
	entries.Mark
}

func (l *earlies) add(e early) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.list) == mostEarly {
		l.list = l.list[1:]
	}
	l.list = append(l.list, e)
}

// latest takes the latest entry that is whole, and forgets those that have gone.
func (l *earlies) latest() (m *entries.Move, from *root) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for at := len(l.list) - 1; at >= 0 && m == nil; at-- {
		e := l.list[at]
		from = e.root
		from.Lock()
		stands := from.Stands(e.Mark)
		if stands {
			m = from.Moves.Copy(e.Slot)
		}
		whole := stands && from.Index.At(e.Slot).Is(index.Complete)
		from.Unlock()
		if m != nil || !stands || whole { // what is whole and moves already is looked at by that move's end
			l.list = append(l.list[:at], l.list[at+1:]...)
		}
	}
	return m, from
}

// bringNear offers as many of the early entries to the root's level as it has room for now.
func (r *root) bringNear() {
	for room := r.ready(); room > 0; {
		m, from := r.level.early.latest()
		if m == nil {
			return
		}
		v := &moves.Entry{Move: m, Kind: moves.Promotion, From: &from.origin, To: r.level, Wanted: true}
		if !v.Offer(r.store.mover) {
			if !r.level.Holds(m.Fingerprint) { // too much waits
				r.level.early.add(early{from, m.Mark})
			}
			return
		}
		room -= v.Bytes()
	}
}
