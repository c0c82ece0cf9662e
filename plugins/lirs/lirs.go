// Package lirs is the first-party eviction policy "lirs": what matters is not how long ago an entry was used but how
// much else was used between its last two uses. Entries for which that is little are LIR and keep 99 % of the capacity;
// the others, HIR, pass through a short queue. The stack orders entries, and what is remembered of those gone, by last
// use down to the oldest LIR entry: a HIR entry used while it is still in the stack has shown a shorter distance than that
// LIR entry has, and takes its place.
//
// S. Jiang, X. Zhang, LIRS: An Efficient Low Inter-reference Recency Set Replacement Policy to Improve Buffer Cache
// Performance, SIGMETRICS 2002.
//
// The paper lets the stack grow without bound; here it remembers at most as many units that are gone as the capacity has, and
// forgets those evicted first. The host asks for victims before it says what they make room for, and LIRS chooses
// without looking at that.
//
// O(1) per event, pruning amortised; a long prune goes on with the next batch.
package lirs

import (
	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/plugins/internal/slots"
)

// ConfigHIR is the share of HIR entries, in percent of the capacity.
const ConfigHIR = "hir"

const (
	lir  slots.List = 1 + iota // in no particular order: the stack orders them
	hir                        // resident HIR, the next victim at the back: the paper's Q
	gone                       // ghosts, the first evicted at the back; each is in the stack
)

// Policy is a [guest.Evictor].
type Policy struct {
	t        *slots.Table
	stack    slots.Ring // the paper's S; its last node stands for its ends, next of which is the top
	end      uint32
	lirUnits uint64
	capacity uint64
	pruned   uint32 // in this batch
}

// New makes an empty policy.
func New(info guest.Info) (*Policy, error) {
	percent, err := info.Config.Int(ConfigHIR, 1, 1, 99)
	if err != nil {
		return nil, err
	}
	ghosts := slots.Ghosts(info.MaxSlots, 100)
	t, err := slots.NewTable(info.MaxSlots, ghosts, gone)
	if err != nil {
		return nil, err
	}
	capacity := info.Capacity / abi.SizeUnit
	return &Policy{
		t: t, stack: slots.NewRing(info.MaxSlots + ghosts + 1), end: info.MaxSlots + ghosts,
		lirUnits: capacity - max(1, capacity*uint64(percent)/100), capacity: capacity,
	}, nil
}

// Events applies a batch.
func (p *Policy) Events(batch []abi.Event) {
	p.pruned = 0
	p.t.Apply(batch, p)
}

// Touch is a hit.
func (p *Policy) Touch(slot uint32) {
	stacked := !p.stack.Alone(slot)
	p.stack.Remove(slot)
	p.stack.InsertAfter(p.end, slot)
	switch {
	case p.t.In(slot) == lir:
		p.prune()
	case stacked:
		p.t.MoveFront(lir, slot)
		p.demote()
	default:
		p.t.MoveFront(hir, slot)
	}
}

// Insert is a miss.
func (p *Policy) Insert(ev *abi.Event) {
	to := hir
	if ghost := p.t.Ghost(ev.Key); ghost != slots.None {
		p.forget(ghost)
		to = lir
	} else if p.t.Units(lir)+uint64(ev.Size) <= p.lirUnits {
		to = lir
	}
	if p.t.Insert(ev, to) {
		p.stack.InsertAfter(p.end, ev.Slot)
		p.demote()
	}
}

// demote makes LIR entries at the stack's bottom HIR until the LIR ones keep to their share.
func (p *Policy) demote() {
	for n := 0; n < maxDemoted && p.prune() && p.t.Units(lir) > p.lirUnits; n++ {
		bottom := p.stack.Prev(p.end)
		p.stack.Remove(bottom)
		p.t.MoveFront(hir, bottom)
	}
	p.prune()
}

// What is done at most; the rest is left to the following events.
const (
	maxDemoted = 4   // by one event
	maxPruned  = 512 // by one batch
)

// prune takes from the stack's bottom what is not LIR: it is there, or remembered, only to be compared with a LIR entry
// further down. It says whether a LIR entry is at the bottom now.
func (p *Policy) prune() bool {
	for ; p.pruned < maxPruned; p.pruned++ {
		bottom := p.stack.Prev(p.end)
		if bottom == p.end || p.t.In(bottom) == lir {
			return bottom != p.end
		}
		if p.t.IsGhost(bottom) {
			p.forget(bottom)
		} else {
			p.stack.Remove(bottom)
		}
	}
	return false
}

func (p *Policy) forget(ghost uint32) {
	p.stack.Remove(ghost)
	p.t.DropGhost(ghost)
}

// Remove remembers what was evicted while it was in the stack.
func (p *Policy) Remove(slot uint32) {
	e := *p.t.At(slot)
	remember := p.t.In(slot) == hir && p.t.Evicted(slot) && !p.stack.Alone(slot)
	p.t.Remove(slot)
	if !remember {
		p.stack.Remove(slot)
		p.prune()
		return
	}
	for n := 0; n < maxDemoted && p.t.Len(gone) > 0 && (p.t.GhostsFree() == 0 || p.t.Units(gone)+uint64(e.Size) > p.capacity); n++ {
		p.forget(p.t.Back(gone))
	}
	if old := p.t.Ghost(e.Key); old != slots.None {
		p.forget(old)
	}
	ghost := p.t.NewGhost(e.Key, e.Size)
	p.stack.Replace(slot, ghost)
	p.t.PushFront(gone, ghost)
}

// Victims names from the front of the queue of HIR entries, then LIR ones from the stack's bottom.
func (p *Policy) Victims(ask abi.Ask, dst []uint32) int {
	a := p.t.Ask(ask, dst)
	a.NameFrom(p.t.Back(hir))
	for at := p.stack.Prev(p.end); at != p.end && a.More(); at = p.stack.Prev(at) {
		if p.t.In(at) == lir && a.May(at) {
			a.Name(at)
		}
	}
	return a.Count()
}
