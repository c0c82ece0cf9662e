package store

import (
	"sync"

	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/internal/store/moves"
)

// mostEarly is the maximum number of entries that are remembered because they came before their memory was allocated.
const mostEarly = 1 << 14

// earlies are entries that belong in a level but were stored in a farther one, because the level's memory was not allocated
// yet. They are copied to the level as its memory becomes available.
type earlies struct {
	mu   sync.Mutex
	list []early // oldest first
}

type early struct {
	from *moves.Origin
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

// latest takes the latest complete entry and forgets entries that are gone.
func (l *earlies) latest() (m *entries.Move, from *moves.Origin) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for at := len(l.list) - 1; at >= 0 && m == nil; at-- {
		e := l.list[at]
		from = e.from
		from.Lock()
		stands := from.Stands(e.Mark)
		if stands {
			m = from.Moves.Copy(e.Slot)
		}
		whole := stands && from.Index.At(e.Slot).Is(index.Complete)
		from.Unlock()
		if m != nil || !stands || whole { // an entry that is complete and being moved already is handled by that move
			l.list = append(l.list[:at], l.list[at+1:]...)
		}
	}
	return m, from
}
