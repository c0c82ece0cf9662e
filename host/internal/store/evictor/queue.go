package evictor

import (
	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/store/index"
)

// victimQueue are victims that the policy has named before they are needed, so that it is asked once for many: a
// crossing costs as much as a hundred events. Only a policy that allows it in its manifest is asked for more than is
// needed, because the victims must still be what it would name when their turn comes. That holds where the order is
// that of the last touch: an entry that was touched or inserted since comes behind all that were named. A queued victim
// is discarded if it was touched since, if its slot was reused, or if it is pinned. If an older entry becomes
// evictable, the whole queue is discarded.
type victimQueue struct {
	slots    []uint32
	buffer   [MaxVictims]uint32
	by       *policy.Evict // that named them
	fallback *recency      // or that named them while the policy was down
	horizon  uint32        // the latest touch among them when they were named
	clock    uint32        // of the index then: it goes back when the ticks run out
}

// evictable follows an entry that can be evicted again.
func (q *victimQueue) evictable(e *index.Entry) {
	if len(q.slots) > 0 && e.LastTouch() <= q.horizon {
		q.slots = nil
	}
}

// current are the victims in the queue, unless another policy named them.
func (q *victimQueue) current(v *Evictor) []uint32 {
	if len(q.slots) > 0 && (q.by != v.policy || q.fallback != v.fallback || v.x.Clock() < q.clock) {
		q.slots = nil
	}
	return q.slots
}

// stands says whether a queued victim can still be evicted in its turn.
func (q *victimQueue) stands(v *Evictor, slot uint32) bool {
	return v.Evictable(slot) && v.x.At(slot).LastTouch() <= q.horizon
}

// refill asks for victims for so many bytes and for those to come.
func (q *victimQueue) refill(v *Evictor, bytes int64) {
	extra := v.policy.VictimsAhead()
	usual := max(1, v.cfg.Host.Used()/int64(max(1, v.x.Len())))
	ask := abi.Ask{
		Bytes: uint64(v.size.Capacity), Tenant: abi.None, // what is asked for is a number of them
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

// queuedVictims evicts from the queue, which is refilled once when it does not suffice, and returns how many bytes are
// left to free.
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
