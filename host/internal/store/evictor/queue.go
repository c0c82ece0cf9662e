package evictor

import (
	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/store/index"
)

// victimQueue holds victims that the policy has named before they are needed, so that it is asked once for many victims. A call
// into the module costs as much as a hundred events. A policy is asked for more victims than needed only if its manifest
// permits it, because the victims must still be right when their turn comes. This is so for policies that order entries by the
// last touch: an entry that is touched or inserted later comes after all named ones. A queued victim is discarded if it was
// touched since, if its slot was reused, or if it is pinned. If an older entry becomes evictable, the whole queue is discarded.
type victimQueue struct {
	slots    []uint32
	buffer   [MaxVictims]uint32
	by       *policy.Evict // policy that named them
	fallback *recency      // fallback that named them; nil if the policy did
	horizon  uint32        // latest touch among them when they were named
	clock    uint32        // clock of the index at that time; it goes back when the ticks run out
}

// evictable records that an entry can be evicted again.
func (q *victimQueue) evictable(e *index.Entry) {
	if len(q.slots) > 0 && e.LastTouch() <= q.horizon {
		q.slots = nil
	}
}

// current returns the queued victims, unless another policy named them.
func (q *victimQueue) current(v *Evictor) []uint32 {
	if len(q.slots) > 0 && (q.by != v.policy || q.fallback != v.fallback || v.x.Clock() < q.clock) {
		q.slots = nil
	}
	return q.slots
}

// stands reports whether a queued victim can still be evicted.
func (q *victimQueue) stands(v *Evictor, slot uint32) bool {
	return v.Evictable(slot) && v.x.At(slot).LastTouch() <= q.horizon
}

// refill asks the policy for victims that free the given bytes, and for further ones in advance.
func (q *victimQueue) refill(v *Evictor, bytes int64) {
	extra := v.policy.VictimsAhead()
	usual := max(1, v.cfg.Host.Used()/int64(max(1, v.x.Len())))
	ask := abi.Ask{
		Bytes: uint64(v.size.Capacity), Tenant: abi.None, // the number of victims is the limit
		MaxVictims: uint32(min(bytes/usual+int64(extra), MaxVictims)),
	}
	n := v.Ask(ask, q.buffer[:])
	q.slots, q.by, q.fallback, q.horizon, q.clock = q.buffer[:0], v.policy, v.fallback, 0, v.x.Clock()
	for _, slot := range q.buffer[:n] {
		if !v.Evictable(slot) {
			v.count.BadVictims++
			continue
		}
		q.horizon = max(q.horizon, v.x.At(slot).LastTouch())
		q.slots = append(q.slots, slot)
	}
}

// queuedVictims evicts from the queue, which it refills once if necessary. It returns the bytes that are left to free.
func (v *Evictor) queuedVictims(bytes int64, evict func(slot uint32)) (left int64) {
	for refilled := false; ; refilled = true {
		for queued := v.queue.current(v); len(queued) > 0 && bytes > 0; queued = v.queue.current(v) {
			slot := queued[0]
			v.queue.slots = queued[1:]
			if v.queue.stands(v, slot) {
				bytes -= v.x.Bytes(slot)
				evict(slot)
			}
		}
		if bytes <= 0 || refilled {
			return bytes
		}
		v.queue.refill(v, bytes)
	}
}
