package evictor

import (
	"cmp"
	"context"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/store/index"
)

// recency is the built-in policy: the least recently touched entries are evicted. It needs to be told nothing, so it
// answers at once, however many entries there are. It goes through a list of the entries, oldest first, and skips those
// that were touched since. A long list is made in the background; until it is there, the oldest of a few entries drawn at
// random is evicted.
type recency struct {
	told    bool      // only entries that the policy knows
	order   []Touched // those that it has not come to
	passed  []Touched // older ones that could not go when it came to them
	listing bool      // the list is being made
	// vain are the tenants for whom a whole list had no evictable entry, until one of their entries can go again. One that
	// has filled its quota with entries in use would have a list made for each of its stores.
	vain map[uint32]struct{}
}

const (
	shortList = 4096 // entries that are listed at once
	maxPassed = 4096 // of them, the others are found again by the next list
	drawn     = 32   // for each victim
	drawnMore = 1024 // for the first, if those were none: a tenant's share of the entries may be small
	mostVain  = 64
)

// Touched is an entry at the time of its last touch.
type Touched struct {
	Slot        uint32
	Fingerprint uint64
	tick, depth uint32
}

// victims names the oldest entries.
func (s *recency) victims(v *Evictor, ask abi.Ask, dst []uint32) (n int) {
	dst = dst[:min(uint32(len(dst)), ask.MaxVictims)]
	if _, vain := s.vain[ask.Tenant]; vain || len(dst) == 0 {
		return 0
	}
	whole := len(s.order)+len(s.passed) == 0
	if whole {
		s.list(v)
	}
	n = s.oldest(v, &ask, dst)
	if n == 0 && !whole { // the list lacks what could not go when it was come to, and what is newer than it
		s.list(v)
		n = s.oldest(v, &ask, dst)
	}
	for s.listing && n < len(dst) && ask.Bytes > 0 {
		slot := s.draw(v, ask.Tenant, dst[:n])
		if slot == index.None {
			break
		}
		dst[n] = slot
		n++
		ask.Bytes -= min(ask.Bytes, uint64(v.x.Bytes(slot)))
	}
	if n == 0 && !s.listing {
		if s.vain == nil || len(s.vain) == mostVain {
			s.vain = map[uint32]struct{}{}
		}
		s.vain[ask.Tenant] = struct{}{}
	}
	return n
}

// evictable follows a tenant's entry that can be evicted again.
func (s *recency) evictable(tenant uint32) {
	if len(s.vain) > 0 {
		delete(s.vain, tenant)
		delete(s.vain, abi.None)
	}
}

// oldest goes through the list, as far as the question needs.
func (s *recency) oldest(v *Evictor, ask *abi.Ask, dst []uint32) (n int) {
	visit := func(m *Touched) (stays bool) {
		switch {
		case !s.stands(v, m.Slot) || !v.current(m) || v.x.At(m.Slot).LastTouch() != m.tick:
			return false
		case !v.fits(m.Slot, ask.Tenant):
			return true
		}
		dst[n] = m.Slot
		n++
		ask.Bytes -= min(ask.Bytes, uint64(v.x.Bytes(m.Slot)))
		return false
	}
	enough := func() bool { return n == len(dst) || ask.Bytes == 0 }
	kept := s.passed[:0]
	for i := range s.passed {
		if enough() || visit(&s.passed[i]) {
			kept = append(kept, s.passed[i])
		}
	}
	s.passed = kept
	for len(s.order) > 0 && !enough() {
		m := s.order[0]
		s.order = s.order[1:]
		if visit(&m) && len(s.passed) < maxPassed {
			s.passed = append(s.passed, m)
		}
	}
	return n
}

// stands says whether a slot is one that may be named at all.
func (s *recency) stands(v *Evictor, slot uint32) bool {
	return slot < v.x.High() && (!s.told || v.x.At(slot).Is(index.Announced))
}

// list makes the list: now when it is short, else in the background.
func (s *recency) list(v *Evictor) {
	if v.x.High() <= shortList {
		s.order, s.passed = v.collect(nil, 0, v.x.High()), s.passed[:0]
		sortByTouch(s.order)
		return
	}
	if s.listing || v.cfg.Run.Err() != nil {
		return
	}
	v.run(func(context.Context) {
		order := v.Snapshot()
		v.mu.Lock()
		s.order, s.passed, s.listing = order, s.passed[:0], false
		v.mu.Unlock()
	})
	s.listing = true
}

// draw is the oldest of some entries that can be evicted, or none.
func (s *recency) draw(v *Evictor, tenant uint32, except []uint32) uint32 {
	best := index.None
	for i := 0; i < drawn || best == index.None && len(except) == 0 && i < drawnMore; i++ {
		slot := rand.Uint32N(v.x.High())
		if !s.stands(v, slot) || !v.fits(slot, tenant) || slices.Contains(except, slot) ||
			best != index.None && v.x.At(slot).LastTouch() >= v.x.At(best).LastTouch() {
			continue
		}
		best = slot
	}
	return best
}

// current says whether an entry that was listed is still there.
func (v *Evictor) current(m *Touched) bool {
	if m.Slot >= v.x.High() {
		return false
	}
	e := v.x.At(m.Slot)
	return e.Is(index.Live) && !e.Is(index.Evicting) && v.x.Fingerprint(m.Slot) == m.Fingerprint
}

// slice is how many entries are listed or told while the lock is held once: a tenth of a millisecond's work, because a
// call of a session takes the lock several times and may wait for a slice at each.
const slice = 64

// yield lets sessions have the root for as long as a slice had it. A mutex alone would not: whoever releases it and
// takes it again at once is faster than those who wait, until one has waited for a millisecond.
func yield(since time.Time) { time.Sleep(time.Since(since)) }

// Snapshot lists the entries, least recently touched first. It takes the lock, a slice at a time.
func (v *Evictor) Snapshot() []Touched {
	v.mu.Lock()
	used := v.x.Len()
	v.mu.Unlock()
	order := make([]Touched, 0, used+used/64)
	start := time.Now()
	for from, high := uint32(0), uint32(1); from < high; from += slice {
		v.mu.Lock()
		high = v.x.High()
		order = v.collect(order, from, min(from+slice, high))
		v.mu.Unlock()
		if from/slice%16 == 15 {
			yield(start)
			start = time.Now()
		}
	}
	sortByTouch(order)
	return order
}

// collect appends the entries of a range of slots.
func (v *Evictor) collect(order []Touched, from, to uint32) []Touched {
	for slot := from; slot < to; slot++ {
		if e := v.x.At(slot); e.Is(index.Live) && !e.Is(index.Evicting) {
			order = append(order, Touched{slot, v.x.Fingerprint(slot), e.LastTouch(), e.Depth()})
		}
	}
	return order
}

func sortByTouch(order []Touched) {
	slices.SortFunc(order, func(a, b Touched) int {
		return cmp.Or(cmp.Compare(a.tick, b.tick), cmp.Compare(a.depth, b.depth), cmp.Compare(a.Slot, b.Slot))
	})
}
