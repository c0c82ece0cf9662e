package evictor

import (
	"cmp"
	"context"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/store/index"
)

// recency is the fallback: the least recently touched entries are evicted. It needs to be told nothing, so it answers
// at once, however many entries there are. It goes through a list of the entries, oldest first, and skips those that
// were touched since. A long list is made in the background; until it is there, the oldest of a few entries drawn at
// random is evicted.
type recency struct {
	order   []Touched
	listing bool // the list is being made
}

const (
	shortList = 4096 // entries that are listed at once
	drawn     = 32   // for each victim
)

// Touched is an entry at the time of its last touch.
type Touched struct {
	Slot        uint32
	Fingerprint uint64
	tick, depth uint32
}

// victims names the oldest entries.
func (s *recency) victims(v *Evictor, ask abi.Ask, dst []uint32) (n int) {
	if len(s.order) == 0 {
		s.list(v)
	}
	dst = dst[:min(uint32(len(dst)), ask.MaxVictims)]
	take := func(slot uint32) (more bool) {
		dst[n] = slot
		n++
		ask.Bytes -= min(ask.Bytes, uint64(v.x.Bytes(slot)))
		return n < len(dst) && ask.Bytes > 0
	}
	if len(dst) == 0 {
		return 0
	}
	for len(s.order) > 0 {
		m := &s.order[0]
		s.order = s.order[1:]
		if v.current(m) && v.x.At(m.Slot).LastTouch() == m.tick && v.fits(m.Slot, ask.Tenant) && !take(m.Slot) {
			return n
		}
	}
	for s.listing {
		slot := draw(v, ask.Tenant, dst[:n])
		if slot == index.None || !take(slot) {
			break
		}
	}
	return n
}

// list makes the list: now when it is short, else in the background.
func (s *recency) list(v *Evictor) {
	if v.x.High() <= shortList {
		s.order = v.collect(s.order[:0:0], 0, v.x.High())
		sortByTouch(s.order)
		return
	}
	if s.listing || v.cfg.Run.Err() != nil {
		return
	}
	v.run(func(context.Context) {
		order := v.Snapshot()
		v.mu.Lock()
		s.order, s.listing = order, false
		v.mu.Unlock()
	})
	s.listing = true
}

// draw is the oldest of some entries that can be evicted, or none.
func draw(v *Evictor, tenant uint32, except []uint32) uint32 {
	best := index.None
	for range drawn {
		slot := rand.Uint32N(v.x.High())
		if !v.fits(slot, tenant) || slices.Contains(except, slot) ||
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
