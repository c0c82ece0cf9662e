// Package gdsf is the first-party eviction policy "gdsf", greedy dual size with frequency: an entry's priority is
// uses × cost / size plus the priority of the last victim when it was last used; the lowest goes first.
//
// L. Cherkasova, Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy, HP Labs technical
// report HPL-98-69R1, 1998.
//
// The cost is that of computing the chunk again. Attention makes a deep chunk dearer than a shallow one, so the cost is
// 1 + depth × depth_cost / 1024; depth_cost is 0 by default, the paper's constant cost. With that and equal sizes gdsf
// decides as lfu does with aging, up to rounding. Priorities are whole numbers in units of 2^-26 uses per 4 KiB.
//
// O(log n) per event.
package gdsf

import (
	"fmt"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/plugins/internal/slots"
)

// ConfigDepthCost is the configuration key of the cost of depth, in 1/1024 of a first chunk's cost per chunk of depth.
const ConfigDepthCost = "depth_cost"

const (
	all      slots.List = 1
	costUnit            = 1 << 10
	maxUses             = 1<<16 - 1 // uses × cost × scale stays within 64 bits
	maxCost             = 1<<26 - 1
	scale               = 1 << 16 // and costUnit make the unit of priorities
)

// Policy is a [guest.Evictor].
type Policy struct {
	t         *slots.Table
	heap      *slots.Heap
	facts     slots.Array[fact] // by slot
	order     uint64
	age       uint64 // priority of the last victim
	depthCost uint64
}

type fact struct{ uses, cost uint32 }

// New makes an empty policy.
func New(info guest.Info) (*Policy, error) {
	depthCost, err := info.Config.Int(ConfigDepthCost, 0)
	if err != nil {
		return nil, err
	}
	if depthCost < 0 || depthCost > costUnit {
		return nil, fmt.Errorf("config %s = %d: want 0 to %d", ConfigDepthCost, depthCost, costUnit)
	}
	t, err := slots.NewTable(info.MaxSlots, 0, all)
	if err != nil {
		return nil, err
	}
	return &Policy{t: t, heap: slots.NewHeap(info.MaxSlots), facts: slots.NewArray(info.MaxSlots, fact{}), depthCost: uint64(depthCost)}, nil
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
				cost := costUnit + uint64(ev.Depth)*p.depthCost
				*p.facts.Make(ev.Slot) = fact{cost: uint32(min(cost, maxCost))}
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
	f := p.facts.At(slot)
	if f.uses < maxUses {
		f.uses++
	}
	p.order++
	worth := uint64(f.uses) * uint64(f.cost) * scale / uint64(max(1, p.t.At(slot).Size))
	p.heap.Set(slot, slots.Rank{Priority: p.age + worth, Order: p.order})
}

func (p *Policy) remove(slot uint32) {
	if !p.t.Resident(slot) {
		return
	}
	if p.t.Evicted(slot) {
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
