package store

import (
	"cmp"
	"errors"
	"slices"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/policy"
	"github.com/kvhost/kvhost/host/store/index"
)

// successor is an evict policy that is being told what is here while another one answers. The events of that time reach it,
// too, so that it can take over between any two of them.
type successor struct {
	evict *policy.Evict
	told  []uint64 // slots it knows of, a bit each
	whole bool     // it knows of all: it has the state of the acting one
	held  []abi.Event
	err   error
}

// replaySlice is how many entries are looked at or told in one go with the root's lock held: a tenth of a millisecond's
// work, because a call of a session takes the lock several times and may wait for a slice at each.
const replaySlice = 64

// breathe lets sessions have the root for as long as a slice had it. A mutex alone would not: who gives it up and takes it
// again at once is faster than those who wait, until one has waited for a millisecond.
func breathe(since time.Time) { time.Sleep(time.Since(since)) }

// revive starts a policy that failed again after pauses, until it has taken over, another has, or its module is given up.
func (r *root) revive(failed *bound, pause time.Duration) {
	for {
		select {
		case <-r.store.run.Done():
			return
		case <-time.After(pause):
		}
		err := r.restart(failed)
		if err == nil || errors.Is(err, errSuperseded) || r.store.run.Err() != nil {
			return
		}
		var verdict policy.Verdict
		if verdict, pause = failed.Module.Failed(abi.RoleEvict, err); verdict != policy.Restart {
			return
		}
	}
}

func (r *root) restart(failed *bound) error {
	c, err := r.prepare(r.store.run, failed, failed)
	if err == nil {
		_, err = c.finish()
	}
	return err
}

// touched is an entry at the time of its last touch.
type touched struct {
	mark
	tick, depth uint32
}

// snapshot lists the entries, least recently touched first. What changes meanwhile reaches a successor as an event.
func (r *root) snapshot() []touched {
	r.mu.Lock()
	used := r.x.Len()
	r.mu.Unlock()
	order := make([]touched, 0, used+used/64)
	start := time.Now()
	for from, high := uint32(0), uint32(1); from < high; from += replaySlice {
		r.mu.Lock()
		high = r.x.High()
		order = r.collect(order, from, min(from+replaySlice, high))
		r.mu.Unlock()
		if from/replaySlice%16 == 15 {
			breathe(start)
			start = time.Now()
		}
	}
	byTouch(order)
	return order
}

// collect appends the entries of a range of slots. The caller holds mu.
func (r *root) collect(order []touched, from, to uint32) []touched {
	for slot := from; slot < to; slot++ {
		if e := r.x.At(slot); e.Is(index.Live) && !e.Is(index.Evicting) {
			order = append(order, touched{mark{slot, r.x.Fingerprint(slot)}, e.LastTouch(), e.Depth()})
		}
	}
	return order
}

func byTouch(order []touched) {
	slices.SortFunc(order, func(a, b touched) int {
		return cmp.Or(cmp.Compare(a.tick, b.tick), cmp.Compare(a.depth, b.depth), cmp.Compare(a.slot, b.slot))
	})
}

// The rest runs under root.mu.

func (h *successor) knows(slot uint32) bool {
	return int(slot/64) < len(h.told) && h.told[slot/64]&(1<<(slot%64)) != 0
}

func (h *successor) note(slot uint32, known bool) {
	for int(slot/64) >= len(h.told) {
		h.told = append(h.told, 0)
	}
	if known {
		h.told[slot/64] |= 1 << (slot % 64)
	} else {
		h.told[slot/64] &^= 1 << (slot % 64)
	}
}

func (h *successor) send(ev abi.Event) {
	switch {
	case h.err != nil:
	case h.evict == nil || len(h.held) > 0:
		h.held = append(h.held, ev)
	default:
		h.err = h.evict.Event(ev)
	}
}

// follow passes on an event that the acting policy got. What it changes in an entry that the successor does not know yet is in
// the index, and told with the entry: at once when it is a touch, because a later place in the order would be wrong.
func (h *successor) follow(r *root, ev abi.Event) {
	switch {
	case h.whole || ev.Op == abi.OpRequestEnd:
		h.send(ev)
		return
	case ev.Op == abi.OpInsert:
		h.note(ev.Slot, true)
	case !h.knows(ev.Slot):
		if ev.Op == abi.OpTouch {
			h.announce(r, ev.Slot, ev.Key)
		}
		return
	case ev.Op == abi.OpRemove:
		h.note(ev.Slot, false)
	case ev.Op == abi.OpResident:
		return // the acting policy is new itself
	}
	if ev.Parent != index.None && !h.knows(ev.Parent) {
		if ev.Op == abi.OpLink {
			return
		}
		ev.Parent = index.None
	}
	h.send(ev)
}

// announce tells of an entry for the first time, and links the children that came before it.
func (h *successor) announce(r *root, slot uint32, print uint64) {
	e := r.x.At(slot)
	ev := abi.Event{
		Slot: slot, Parent: index.None, Key: print, ParentKey: e.Parent(), Size: r.x.EntryUnits(slot, e), Depth: e.Depth(),
		Tenant: r.tenantOf(slot), Op: abi.OpResident, Time: r.store.clock(),
	}
	if parent := r.x.FindFingerprint(ev.ParentKey); parent != index.None && h.knows(parent) {
		ev.Parent = parent
	}
	h.note(slot, true)
	h.send(ev)
	if e.Pins() > 0 {
		ev.Op, ev.Parent = abi.OpPin, index.None
		h.send(ev)
	}
	r.x.Children(print, func(child uint32) {
		if c := r.x.At(child); h.knows(child) && child != slot {
			h.send(abi.Event{
				Slot: child, Parent: slot, Key: r.x.Fingerprint(child), ParentKey: print, Size: r.x.EntryUnits(child, c), Depth: c.Depth(),
				Tenant: r.tenantOf(child), Op: abi.OpLink, Time: r.store.clock(),
			})
		}
	})
}
