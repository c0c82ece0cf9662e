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
	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/plugins/internal/slots"
)

// ConfigDepthCost is the configuration key of the cost of depth, in 1/1024 of a first chunk's cost per chunk of depth.
const ConfigDepthCost = "depth_cost"

const (
	costUnit = 1 << 10
	maxUses  = 1<<16 - 1 // uses × cost × scale stays within 64 bits
	maxCost  = 1<<26 - 1
	scale    = 1 << 16 // and costUnit make the unit of priorities
)

// Policy is a [guest.Evictor].
type Policy struct {
	*slots.Aging
	facts     slots.Array[fact] // by slot
	depthCost uint64
}

type fact struct{ uses, cost uint32 }

// New makes an empty policy.
func New(info guest.Info) (*Policy, error) {
	depthCost, err := info.Config.Int(ConfigDepthCost, 0, 0, costUnit)
	if err != nil {
		return nil, err
	}
	p := &Policy{facts: slots.NewArray(info.MaxSlots, fact{}), depthCost: uint64(depthCost)}
	p.Aging, err = slots.NewAging(info.MaxSlots, true, p.insert, p.use)
	return p, err
}

func (p *Policy) insert(ev *abi.Event) {
	cost := costUnit + uint64(ev.Depth)*p.depthCost
	*p.facts.Make(ev.Slot) = fact{cost: uint32(min(cost, maxCost))}
}

func (p *Policy) use(slot uint32) uint64 {
	f := p.facts.At(slot)
	if f.uses < maxUses {
		f.uses++
	}
	return uint64(f.uses) * uint64(f.cost) * scale / uint64(max(1, p.At(slot).Size))
}
