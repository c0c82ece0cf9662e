// Package lfu is the first-party eviction policy "lfu": the entry used least often goes first, and among equals the one
// with the last use furthest back. With dynamic aging, the default, an entry's priority is its count of uses plus the
// priority of the last victim when it was last used, so that what was popular once does not stay for ever.
//
// M. Arlitt, L. Cherkasova, J. Dilley, R. Friedrich, T. Jin, Evaluating Content Management Techniques for Web Proxy
// Caches, Performance Evaluation Review 27(4), 2000 (LFU-DA).
//
// O(log n) per event.
package lfu

import (
	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/plugins/internal/slots"
)

// ConfigAging switches dynamic aging.
const ConfigAging = "aging"

const all slots.List = 1

// Policy is a [guest.Evictor].
type Policy struct {
	t     *slots.Table
	heap  *slots.Heap
	uses  slots.Array[uint32] // by slot
	order uint64
	age   uint64 // priority of the last victim, 0 without aging
	aging bool
}

// New makes an empty policy.
func New(info guest.Info) (*Policy, error) {
	aging, err := info.Config.Bool(ConfigAging, true)
	if err != nil {
		return nil, err
	}
	t, err := slots.NewTable(info.MaxSlots, 0, all)
	if err != nil {
		return nil, err
	}
	return &Policy{t: t, heap: slots.NewHeap(info.MaxSlots), uses: slots.NewArray(info.MaxSlots, uint32(0)), aging: aging}, nil
}

// Events applies a batch.
func (p *Policy) Events(batch []abi.Event) {
	p.heap.Begin()
	for i := range batch {
		ev := &batch[i]
		switch ev.Op {
		case abi.OpTouch:
			if p.t.Resident(ev.Slot) {
				p.use(ev.Slot)
			}
		case abi.OpInsert, abi.OpResident:
			p.remove(ev.Slot)
			if p.t.Insert(ev, all) {
				*p.uses.Make(ev.Slot) = 0
				p.use(ev.Slot)
			}
		case abi.OpRemove:
			p.remove(ev.Slot)
		case abi.OpPin, abi.OpUnpin:
			p.t.Pin(ev)
		}
	}
}

func (p *Policy) use(slot uint32) {
	uses := p.uses.At(slot)
	if *uses < 1<<32-1 {
		*uses++
	}
	p.order++
	p.heap.Set(slot, slots.Rank{Priority: p.age + uint64(*uses), Order: p.order})
}

func (p *Policy) remove(slot uint32) {
	if !p.t.Resident(slot) {
		return
	}
	if p.aging && p.t.Evicted(slot) {
		p.age = max(p.age, p.heap.Rank(slot).Priority)
	}
	p.heap.Delete(slot)
	p.t.Remove(slot)
}

// Victims names the entries of lowest priority.
func (p *Policy) Victims(ask abi.Ask, dst []uint32) int {
	a := p.t.Ask(ask, dst)
	p.heap.Lowest(&a)
	return a.Count()
}
