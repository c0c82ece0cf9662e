package sim

import (
	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy"
)

// hierarchy is a host with levels. A chunk may have a copy in each. A lookup touches the nearest copy, and what it grants
// of the prefix is loaded from there.
type hierarchy struct {
	w      *Workload
	levels []simLevel
	admit  *policy.Admit
	place  placement
	write  Write

	loaded  []load      // of the request, in order
	times   *levelTimes // of loads
	refused int         // new chunks that the admit policy did not want
	ask     [1]abi.Candidate
	answer  [1]bool
}

type simLevel struct {
	*cache
	grants  []uint32 // by slot, since the chunk came there
	figures LevelFigures
}

type load struct {
	id    uint32
	level int
}

// nearest is the nearest level that holds a chunk, and its slot there; -1 when none does.
func (h *hierarchy) nearest(id uint32) (n int, slot uint32) {
	for n := range h.levels {
		if slot := h.levels[n].slotOf[id]; slot != abi.None {
			return n, slot
		}
	}
	return -1, abi.None
}

// request looks up one request's chunks, stores those that are missing, and ends the request. It returns the length of the
// resident prefix.
func (h *hierarchy) request(ids []uint32, number uint32) (prefix int, err error) {
	now := h.w.times[number-1]
	if prefix, err = h.forward(ids, number, now); err != nil {
		return 0, err
	}
	end := abi.NewRequestEnd(number, 0, h.w.hints[number-1], now)
	for n := range h.levels {
		if err := h.levels[n].e.Event(end); err != nil {
			return 0, err
		}
	}
	return prefix, nil
}

// forward brings the prefix nearer before the rest is stored: it is loaded before the rest is computed.
func (h *hierarchy) forward(ids []uint32, number uint32, now uint64) (prefix int, err error) {
	prefix = len(ids)
	for depth, id := range ids {
		n, slot := h.nearest(id)
		if n < 0 {
			if depth < prefix {
				prefix = depth
				if err := h.promote(number, now); err != nil {
					return 0, err
				}
			}
			err = h.store(id, number, now, depth+1 < len(ids))
		} else {
			if depth < prefix {
				h.load(n, id)
			}
			err = h.grant(n, slot, id, number, now)
		}
		if err != nil {
			return 0, err
		}
	}
	return prefix, h.promote(number, now)
}

// load counts a chunk of the prefix, which is loaded from a level.
func (h *hierarchy) load(n int, id uint32) {
	h.levels[n].figures.Loads++
	h.loaded = append(h.loaded, load{id, n})
}

// grant touches a chunk where it is nearest.
func (h *hierarchy) grant(n int, slot, id, number uint32, now uint64) error {
	l := &h.levels[n]
	l.figures.Hits++
	l.grants[slot]++
	if err := l.touch(id, slot, number, now); err != nil || h.write != WriteHits || n > 0 || l.grants[slot] > 1 {
		return err
	}
	return h.writeThrough(n, id, number, now)
}

// promote copies what was loaded to the nearest level, if the admit policy likes.
func (h *hierarchy) promote(number uint32, now uint64) error {
	h.times.add(h.loaded)
	for _, x := range h.loaded {
		if x.level == 0 {
			continue
		}
		from, to := &h.levels[x.level], &h.levels[0]
		slot := from.slotOf[x.id]
		if slot == abi.None || to.slotOf[x.id] != abi.None {
			continue // it went, or came, while the request's other chunks moved
		}
		ok, err := h.admits(abi.Candidate{
			Kind: abi.KindPromotion, From: uint8(x.level), Hits: from.grants[slot],
			Flags: h.residentParent(x.id) | h.continued(x.id),
		}, x.id, now)
		if err == nil && ok {
			ok, err = h.copyTo(0, x.id, number, now)
		}
		if err != nil {
			return err
		}
		if ok {
			to.figures.Promotions++
		}
	}
	h.loaded = h.loaded[:0]
	return nil
}

// store stores a new chunk in the nearest level that takes it, and in those behind it when they are written through. It is
// continued if the request has a chunk behind it.
func (h *hierarchy) store(id, number uint32, now uint64, continued bool) error {
	c := abi.Candidate{Kind: abi.KindNew, From: abi.NoLevel, Request: number, Flags: h.residentParent(id)}
	if continued {
		c.Flags |= abi.CandidateContinued
	}
	ok, err := h.admits(c, id, now)
	if err != nil {
		return err
	}
	if !ok {
		h.refused++
		return nil
	}
	first := 0
	if h.place.Place != nil {
		if first, err = h.choose(); err != nil {
			return err
		}
	}
	for n := first; n < len(h.levels); n++ {
		stored, err := h.copyTo(n, id, number, now)
		if err != nil {
			return err
		}
		if stored {
			h.levels[n].figures.New++
			if h.write == WriteThrough {
				err = h.writeThrough(n, id, number, now)
			}
			return err
		}
	}
	return nil
}

// writeThrough copies what a level has to the next one, and so on, while the admit policy likes.
func (h *hierarchy) writeThrough(n int, id, number uint32, now uint64) error {
	for n++; n < len(h.levels); n++ {
		to := &h.levels[n]
		if to.slotOf[id] != abi.None {
			continue
		}
		ok, err := h.admits(abi.Candidate{
			Kind: abi.KindNew, From: uint8(n - 1), To: uint8(n),
			Flags: h.residentParent(id) | h.continued(id),
		}, id, now)
		if err == nil && ok {
			ok, err = h.copyTo(n, id, number, now)
		}
		if err != nil || !ok {
			return err
		}
		to.figures.New++
	}
	return nil
}

// copyTo puts a chunk into a level, and says whether there was room.
func (h *hierarchy) copyTo(n int, id, number uint32, now uint64) (bool, error) {
	l := &h.levels[n]
	slot, err := l.store(id, number, now)
	if err != nil || slot == abi.None {
		return false, err
	}
	l.grants[slot] = 0
	return true, nil
}

// evictedFrom demotes a chunk that a level evicts to the next one, unless that has it or the admit policy refuses it.
func (h *hierarchy) evictedFrom(n int, slot, id, number uint32, now uint64) error {
	l := &h.levels[n]
	if n+1 == len(h.levels) {
		l.figures.Drops++
		return nil
	}
	next := &h.levels[n+1]
	if next.slotOf[id] != abi.None {
		l.figures.Covered++
		return nil
	}
	ok, err := h.admits(abi.Candidate{
		Kind: abi.KindDemotion, From: uint8(n), To: uint8(n + 1), Hits: l.grants[slot],
		Flags: h.residentParent(id) | h.continued(id),
	}, id, now)
	if err == nil && ok {
		ok, err = h.copyTo(n+1, id, number, now)
	}
	if err != nil {
		return err
	}
	if ok {
		next.figures.Demotions++
	} else {
		l.figures.Drops++
	}
	return nil
}

// admits asks the admit policy about a candidate, of which what concerns levels is filled in.
func (h *hierarchy) admits(c abi.Candidate, id uint32, now uint64) (bool, error) {
	c.Key, c.Size, c.Depth, c.Time = h.w.keys[id], h.levels[0].units, h.w.depths[id], now
	if parent := h.w.parents[id]; parent != abi.None {
		c.ParentKey = h.w.keys[parent]
	}
	if int(c.To) == len(h.levels)-1 {
		c.Flags |= abi.CandidateLast
	}
	if c.Kind == abi.KindPromotion && len(h.levels[c.To].free) > 0 {
		c.Flags |= abi.CandidateRoom
	}
	if h.ask[0] = c; h.place.Place != nil {
		return c.Kind == abi.KindNew, nil
	}
	err := h.admit.Admit(h.ask[:], h.answer[:])
	return h.answer[0], err
}

// residentParent says whether a chunk's parent is in any level.
func (h *hierarchy) residentParent(id uint32) uint32 {
	if parent := h.w.parents[id]; parent != abi.None {
		if n, _ := h.nearest(parent); n >= 0 {
			return abi.CandidateParentResident
		}
	}
	return 0
}

// continued says whether a chunk's child is in any level.
func (h *hierarchy) continued(id uint32) uint32 {
	for n := range h.levels {
		if h.levels[n].children[id] > 0 {
			return abi.CandidateContinued
		}
	}
	return 0
}
