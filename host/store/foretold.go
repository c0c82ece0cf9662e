package store

import (
	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/policy"
	"github.com/kvhost/kvhost/host/store/index"
)

// foretold are victims that the evict policy has named before they are needed, so that it is asked once for many: a crossing
// costs as much as a hundred events. Only a policy that says so in its manifest is asked for more than is needed, because
// what it named must still be what it would name when its turn comes. That is so where the order is that of last touch:
// whoever is touched or inserted since stands behind all that were named, and there is nobody before the next of these but
// who could not go at the time. So one that was touched, or whose slot names another entry by now, is told by its last
// touch, one that is pinned or gone by the index; and when an entry that has stood among them or before can go again, all
// are forgotten. It is guarded by root.mu.
type foretold struct {
	slots   []uint32
	room    [maxAsked]uint32
	by      *policy.Evict // who named them
	standin *recency      // or who did while that was down
	horizon uint32        // the latest touch among them, as of then
	clock   uint32        // the index's then: touches are counted anew when it runs out
}

// standing are the victims that were named before, or none. The caller holds mu.
func (r *root) standing() []uint32 {
	a := &r.foretold
	if len(a.slots) > 0 && (a.by != r.evict || a.standin != r.standin || r.x.Clock() < a.clock) {
		a.slots = nil
	}
	return a.slots
}

// foretell asks for victims for so many bytes and for those to come. The caller holds mu.
func (r *root) foretell(bytes int64) {
	a, extra := &r.foretold, r.evict.Ahead()
	usual := max(1, r.account.Used()/int64(max(1, r.x.Len())))
	ask := abi.Ask{
		Bytes: uint64(r.cfg.Capacity), Tenant: abi.None, // what is asked for is a number of them
		MaxVictims: uint32(min(bytes/usual+int64(extra), maxAsked)),
	}
	n := r.ask(ask, a.room[:])
	a.slots, a.by, a.standin, a.horizon, a.clock = a.room[:0], r.evict, r.standin, 0, r.x.Clock()
	for _, slot := range a.room[:n] {
		if !r.evictable(slot) {
			r.count.badVictims++
			continue
		}
		a.horizon = max(a.horizon, r.x.At(slot).LastTouch())
		a.slots = append(a.slots, slot)
	}
}

// mayStillGo says whether a victim named before may still go. The caller holds mu.
func (r *root) mayStillGo(slot uint32) bool {
	return r.evictable(slot) && r.x.At(slot).LastTouch() <= r.foretold.horizon
}

// unpinned is told of an entry that can go again. The caller holds mu.
func (a *foretold) unpinned(e *index.Entry) {
	if e.LastTouch() <= a.horizon {
		a.slots = nil
	}
}
