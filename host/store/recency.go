package store

import (
	"math/rand/v2"
	"slices"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/store/index"
)

// recency decides what is evicted while a policy is down. It needs to be told nothing, so it answers at once, however many
// entries there are: each carries its last touch. It goes by a list of the entries, oldest first, in which those that were
// touched later are passed over; where the list is long it is made aside, and until it is there the oldest of a few
// entries drawn at random goes.
type recency struct {
	order []touched
	under bool // the list is being made
}

const (
	shortList = 4096 // entries that are listed at once
	drawn     = 32   // for each victim
)

// oldest names victims. The caller holds mu.
func (r *root) oldest(ask abi.Ask, dst []uint32) (n int) {
	s := r.standin
	if len(s.order) == 0 {
		r.list(s)
	}
	dst = dst[:min(uint32(len(dst)), ask.MaxVictims)]
	take := func(slot uint32) (more bool) {
		dst[n] = slot
		n++
		ask.Bytes -= min(ask.Bytes, uint64(r.x.Bytes(slot)))
		return n < len(dst) && ask.Bytes > 0
	}
	if len(dst) == 0 {
		return 0
	}
	for len(s.order) > 0 {
		m := s.order[0]
		s.order = s.order[1:]
		if r.stands(m.mark) && r.x.At(m.slot).LastTouch() == m.tick && r.fits(m.slot, ask.Tenant) && !take(m.slot) {
			return n
		}
	}
	for s.under {
		slot := r.draw(ask.Tenant, dst[:n])
		if slot == index.None || !take(slot) {
			break
		}
	}
	return n
}

// list makes the list: now when it is short, else aside.
func (r *root) list(s *recency) {
	if r.x.High() <= shortList {
		s.order = r.collect(s.order[:0:0], 0, r.x.High())
		byTouch(s.order)
		return
	}
	if s.under || r.store.run.Err() != nil {
		return
	}
	s.under = true
	r.store.work.Go(func() {
		order := r.snapshot()
		r.mu.Lock()
		s.order, s.under = order, false
		r.mu.Unlock()
	})
}

// draw is the oldest of some entries that may go, or none.
func (r *root) draw(tenant uint32, but []uint32) uint32 {
	best := index.None
	for range drawn {
		slot := rand.Uint32N(r.x.High())
		if !r.fits(slot, tenant) || best != index.None && r.x.At(slot).LastTouch() >= r.x.At(best).LastTouch() || slices.Contains(but, slot) {
			continue
		}
		best = slot
	}
	return best
}

// fits says whether an entry may be a victim for a tenant's sake.
func (r *root) fits(slot, tenant uint32) bool {
	return r.evictable(slot) && (tenant == abi.None || r.tenantOf(slot) == tenant)
}
