// Package sieve is the first-party eviction policy "sieve". It is a queue in the order of arrival with a hand that
// moves from the oldest entry to the newest. The hand takes the first entry that was not used since it last passed, and
// stays there. Unlike in clock, surviving entries keep their place, so the hand soon reaches the new ones.
//
// Y. Zhang, J. Yang, Y. Yue, Y. Vigfusson, K. V. Rashmi, SIEVE is Simpler than LRU: an Efficient Turn-Key Eviction
// Algorithm for Web Caches, NSDI 2024, algorithm 1.
//
// An event takes O(1). An answer takes one step for each entry that it passes, in at most two rounds. After 4,500
// entries, the next ones are taken regardless of their uses.
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
	hand uint32 // place at which the next answer begins; None for the back
}

// New returns an empty policy.
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

// Insert adds a new entry at the front.
func (p *Policy) Insert(ev *abi.Event) { p.t.Insert(ev, queue) }

// Remove removes an entry. If the hand is on it, the hand moves on.
func (p *Policy) Remove(slot uint32) {
	if slot == p.hand {
		p.hand = p.t.Before(slot)
	}
	p.t.Remove(slot)
}

// Victims moves the hand. The hand ends before the last victim, as if that were removed already.
func (p *Policy) Victims(ask abi.Ask, dst []uint32) int {
	a := p.t.Ask(ask, dst)
	// After a round in which no entry is named, there is one more round, because all bits are cleared then.
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
