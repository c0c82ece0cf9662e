// Package sieve is the first-party eviction policy "sieve": a queue in order of arrival with a hand that moves from the
// oldest entry to the newest, takes the first one that was not used since the hand last passed, and stays there. Unlike
// with clock, entries that survive keep their place, so new ones are looked at soon.
//
// Y. Zhang, J. Yang, Y. Yue, Y. Vigfusson, K. V. Rashmi, SIEVE is Simpler than LRU: an Efficient Turn-Key Eviction
// Algorithm for Web Caches, NSDI 2024, algorithm 1.
//
// O(1) per event. A question costs one step per entry passed, at most two rounds; one that has passed 4,500 takes
// what comes next.
package sieve

import (
	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/plugins/internal/slots"
)

const queue slots.List = 1

// Policy is a [guest.Evictor]. An entry's Mark is its visited bit.
type Policy struct {
	t    *slots.Table
	hand uint32 // where the next question starts; None for the back
}

// New makes an empty policy.
func New(info guest.Info) (*Policy, error) {
	t, err := slots.NewTable(info.MaxSlots, 0, queue)
	if err != nil {
		return nil, err
	}
	return &Policy{t: t, hand: slots.None}, nil
}

// Events applies a batch.
func (p *Policy) Events(batch []abi.Event) { p.t.Apply(batch, p) }

// Touch sets the visited bit.
func (p *Policy) Touch(slot uint32) { p.t.At(slot).Mark = 1 }

// Insert puts a new entry to the front.
func (p *Policy) Insert(ev *abi.Event) { p.t.Insert(ev, queue) }

// Remove forgets an entry. The hand does not stay on it.
func (p *Policy) Remove(slot uint32) {
	if slot == p.hand {
		p.hand = p.t.Before(slot)
	}
	p.t.Remove(slot)
}

// Victims moves the hand. It ends up before the last victim, as if that were gone already.
func (p *Policy) Victims(ask abi.Ask, dst []uint32) int {
	a := p.t.Ask(ask, dst)
	// A round in which nothing is named is the last but one: it cleared all bits.
	for idle := 2 * uint64(p.t.Len(queue)); a.More() && idle > 0; idle-- {
		if p.hand == slots.None {
			p.hand = p.t.Back(queue)
		}
		at := p.hand
		if p.t.At(at).Mark != 0 && a.Spares() {
			p.hand = a.Spare(at)
			continue
		}
		p.hand = p.t.Before(at)
		if a.May(at) {
			a.Name(at)
		}
	}
	return a.Count()
}
