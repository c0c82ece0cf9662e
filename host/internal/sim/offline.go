package sim

import (
	"context"
	"fmt"
	"time"

	"github.com/kvhost/kvhost/abi"
)

// Names of the baselines. They know the future, or need no space, and so are not policies.
const (
	Belady   = "belady"
	Infinite = "infinite"
)

// RunInfinite counts the hits of an unlimited root: only first uses miss.
func (w *Workload) RunInfinite(ctx context.Context, o Options) (Result, error) {
	r, err := w.offline(ctx, len(w.keys), o)
	r.Policy = Infinite
	return r, err
}

// RunBelady evicts the chunk with the next use furthest away (L. A. Belady, A Study of Replacement Algorithms for a
// Virtual-Storage Computer, IBM Systems Journal 5(2), 1966). No policy without prefetching or bypassing does better.
func (w *Workload) RunBelady(ctx context.Context, capacity int, o Options) (Result, error) {
	if capacity < 1 {
		return Result{}, fmt.Errorf("%w: %d chunks", ErrCapacity, capacity)
	}
	r, err := w.offline(ctx, capacity, o)
	r.Policy, r.Capacity = Belady, capacity
	return r, err
}

func (w *Workload) offline(ctx context.Context, capacity int, o Options) (Result, error) {
	r := Result{Capacity: capacity}
	next := w.next()
	h := newFarthest(len(w.keys))
	started := time.Now()
	access := 0
	var err error
	r.PrefixHits, r.SavedSeconds, err = w.play(ctx, &o, Belady, func(ids []uint32, _ uint32) (prefix int, _ error) {
		for prefix < len(ids) && h.has(ids[prefix]) {
			prefix++
		}
		for _, id := range ids {
			if h.has(id) {
				r.Hits++
			} else if len(h.order) == capacity {
				h.pop()
				r.Evictions++
			}
			h.set(id, next[access])
			access++
		}
		return prefix, nil
	})
	if err != nil {
		return r, err
	}
	r.finish(w, &o, started)
	return r, nil
}

// farthest is a heap of chunks. On top is the one with the next use furthest away.
type farthest struct {
	next  []uint32 // by chunk
	place []uint32 // by chunk, in order; abi.None when absent
	order []uint32
}

func newFarthest(chunks int) *farthest {
	h := &farthest{next: make([]uint32, chunks), place: make([]uint32, chunks)}
	for i := range h.place {
		h.place[i] = abi.None
	}
	return h
}

func (h *farthest) has(id uint32) bool { return h.place[id] != abi.None }

// set adds a chunk, or moves it up: its next use only gets later.
func (h *farthest) set(id, next uint32) {
	h.next[id] = next
	at := h.place[id]
	if at == abi.None {
		at = uint32(len(h.order))
		h.order = append(h.order, id)
	}
	for at > 0 {
		parent := (at - 1) / 2
		if h.next[h.order[parent]] >= next {
			break
		}
		h.put(at, h.order[parent])
		at = parent
	}
	h.put(at, id)
}

func (h *farthest) put(at, id uint32) {
	h.order[at] = id
	h.place[id] = at
}

func (h *farthest) pop() {
	last := len(h.order) - 1
	h.place[h.order[0]] = abi.None
	id := h.order[last]
	h.order = h.order[:last]
	if last == 0 {
		return
	}
	at := 0
	for {
		child := 2*at + 1
		if child >= last {
			break
		}
		if child+1 < last && h.next[h.order[child+1]] > h.next[h.order[child]] {
			child++
		}
		if h.next[h.order[child]] <= h.next[id] {
			break
		}
		h.put(uint32(at), h.order[child])
		at = child
	}
	h.put(uint32(at), id)
}
