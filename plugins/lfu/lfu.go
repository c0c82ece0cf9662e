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

// Policy is a [guest.Evictor].
type Policy struct {
	*slots.Aging
	uses slots.Array[uint32] // by slot
}

// New makes an empty policy.
func New(info guest.Info) (*Policy, error) {
	aging, err := info.Config.Bool(ConfigAging, true)
	if err != nil {
		return nil, err
	}
	p := &Policy{uses: slots.NewArray(info.MaxSlots, uint32(0))}
	p.Aging, err = slots.NewAging(info.MaxSlots, aging, func(ev *abi.Event) { *p.uses.Make(ev.Slot) = 0 }, p.use)
	return p, err
}

func (p *Policy) use(slot uint32) uint64 {
	uses := p.uses.At(slot)
	if *uses < 1<<32-1 {
		*uses++
	}
	return uint64(*uses)
}
