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

// recency is the fallback policy, which evicts the least recently touched entries. It needs no events, so it can answer at once
// with any number of entries. It walks through a list of the entries, oldest first, and skips those touched since. A long list
// is made in the background. Until it is complete, recency evicts the oldest of a few entries drawn at random.
type recency struct {
	told    bool      // consider only entries that the policy knows
	order   []Touched // entries that the walk has not reached
	passed  []Touched // older entries that could not be evicted when the walk reached them
	listing bool      // the list is being made
	// vain holds the tenants for which a whole list had no evictable entry, until one of their entries can be evicted again.
	// Otherwise a tenant that has filled its quota with entries in use would cause a new list at each of its stores.
	vain map[uint32]struct{}
}

const (
	shortList = 4096 // entries that are listed at once
	maxPassed = 4096 // passed entries that are kept; the next list finds the others again
	drawn     = 32   // random draws for each victim
	drawnMore = 1024 // draws for the first victim if the usual number found none, since a tenant may have few entries
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
	if n == 0 && !whole { // the list lacks entries that are newer, and some that could not be evicted when the walk reached them
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

// evictable records that an entry of a tenant can be evicted again.
func (s *recency) evictable(tenant uint32) {
	if len(s.vain) > 0 {
		delete(s.vain, tenant)
		delete(s.vain, abi.None)
	}
}

// oldest walks through the list as far as necessary.
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

// stands reports whether an entry in the slot may be named at all.
func (s *recency) stands(v *Evictor, slot uint32) bool {
	return slot < v.x.High() && (!s.told || v.x.At(slot).Is(index.Announced))
}

// list makes the list: at once if it is short, otherwise in the background.
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

// draw returns the oldest of some random entries that can be evicted, or None.
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

// current reports whether a listed entry still exists.
func (v *Evictor) current(m *Touched) bool {
	if m.Slot >= v.x.High() {
		return false
	}
	e := v.x.At(m.Slot)
	return e.Is(index.Live) && !e.Is(index.Evicting) && v.x.Fingerprint(m.Slot) == m.Fingerprint
}

// slice is the number of entries that are listed or told while the lock is held. It takes a tenth of a millisecond, because a
// call of a session takes the lock several times and may wait for a slice at each.
const slice = 64

// yield leaves the root to sessions for as long as a slice took. Releasing the mutex would not be enough: a goroutine that
// takes it again at once is faster than waiting ones, until one of them has waited for a millisecond.
func yield(since time.Time) { time.Sleep(time.Since(since)) }

// Snapshot lists the entries, least recently touched first. It takes the lock for a slice at a time.
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

// collect appends the entries in a range of slots.
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
