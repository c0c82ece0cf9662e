package entries

import (
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/kv"
)

// Has says whether there is an entry in a state that is not being removed.
func (s *Set) Has(fp uint64, state uint8) bool {
	slot := s.Index.FindFingerprint(fp)
	return slot != index.None && s.Index.At(slot).Is(state) && !s.Index.At(slot).Is(index.Evicting)
}

// Continued says whether an entry has the one of a fingerprint as its parent.
func (s *Set) Continued(fp uint64) (continued bool) {
	s.Index.Children(fp, func(uint32) { continued = true })
	return continued
}

// Part is an entry that is not complete, that no put adds to and that can be evicted. It takes the lock.
func (s *Set) Part(fp uint64) (m Mark, ok bool) {
	s.Lock()
	defer s.Unlock()
	slot := s.Index.FindFingerprint(fp)
	ok = slot != index.None && !s.Index.At(slot).Is(index.Complete) && !s.Busy(slot) && s.Evictor.Evictable(slot)
	return Mark{slot, fp}, ok
}

// Marks are all entries that are not being removed. It takes the lock.
func (s *Set) Marks() (list []Mark) {
	s.Lock()
	defer s.Unlock()
	s.Index.Each(func(slot uint32, e *index.Entry) {
		if !e.Is(index.Evicting) {
			list = append(list, Mark{slot, s.Index.Fingerprint(slot)})
		}
	})
	return list
}

// Pinned is a piece of an entry that has a pin for it.
type Pinned struct {
	Class *catalog.Class
	Key   kv.Key
	Name  string // empty: the built-in one
}

// PinPiece pins an entry that has another pin, for one of its pieces, which is loaded if loads says so. There is none where
// the entry is being removed, or has not got the piece: then Key alone is set. It takes the lock.
func (s *Set) PinPiece(slot, rank uint32, loads bool) (p Pinned, ok bool) {
	s.Lock()
	defer s.Unlock()
	e := s.Index.At(slot)
	p.Key = s.Index.Key(slot)
	if e.Is(index.Evicting) || rank >= kv.MaxRanks || s.Index.Pieces(slot)&(1<<rank) == 0 {
		return p, false
	}
	s.Index.Pin(slot)
	if loads {
		s.Prefetched.loaded(slot)
	}
	p.Class = s.ClassOf(slot)
	if e.Is(index.Named) {
		p.Name = s.Index.NameOf(slot, rank)
	}
	return p, true
}

// PinCopy finds a complete copy of an entry and pins it if it is wanted. Prefetched says that a lookup asked for the copy.
// It takes the lock.
func (s *Set) PinCopy(fp uint64, prefetched, wanted bool) (slot uint32, pinned bool) {
	s.Lock()
	defer s.Unlock()
	if !s.Has(fp, index.Complete) {
		return index.None, false
	}
	slot = s.Index.FindFingerprint(fp)
	if prefetched {
		s.Prefetched.Add(slot)
	}
	if wanted {
		s.Moves.Granted(slot, s.Index.At(slot), false)
		s.Evictor.Pin(slot, fp, 0)
	}
	return slot, wanted
}
