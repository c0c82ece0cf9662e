// Package clock is the first-party eviction policy "clock": first in first out, but an entry that was used since the
// hand last passed it gets another round.
//
// F. J. Corbató, A Paging Experiment with the Multics System, MIT Project MAC report MAC-M-384, 1968. The circle is kept
// as a queue with its back where the hand points: passing an entry moves it to the front, which is the same order.
//
// O(1) per event. A question costs one step per entry passed, and an entry is passed once per use; a question that has
// passed 4,000 takes what comes next.
package clock

import (
	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/plugins/internal/slots"
)

const queue slots.List = 1

// Policy is a [guest.Evictor]. An entry's Mark is its used bit.
type Policy struct{ t *slots.Table }

// New makes an empty policy.
func New(info guest.Info) (*Policy, error) {
	t, err := slots.NewTable(info.MaxSlots, 0, queue)
	if err != nil {
		return nil, err
	}
	return &Policy{t: t}, nil
}

// Events applies a batch.
func (p *Policy) Events(batch []abi.Event) { p.t.Apply(batch, p) }

// Touch sets the used bit.
func (p *Policy) Touch(slot uint32) { p.t.At(slot).Mark = 1 }

// Insert puts a new entry behind the hand.
func (p *Policy) Insert(ev *abi.Event) { p.t.Insert(ev, queue) }

// Remove forgets an entry.
func (p *Policy) Remove(slot uint32) { p.t.Remove(slot) }

// Victims turns the hand: the queue is rotated so that its back is always where the hand is.
func (p *Policy) Victims(ask abi.Ask, dst []uint32) int {
	a := p.t.Ask(ask, dst)
	for left := 2 * uint64(p.t.Len(queue)); left > 0 && a.More(); left-- {
		at := p.t.Back(queue)
		next := slots.None
		if p.t.At(at).Mark != 0 && a.Spares() {
			next = a.Spare(at)
		} else {
			if a.May(at) {
				a.Name(at)
			}
			next = p.t.Before(at)
		}
		if next != slots.None {
			p.t.Rotate(next)
		}
	}
	return a.Count()
}
