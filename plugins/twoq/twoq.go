// Package twoq is the first-party eviction policy "twoq", 2Q: a new entry waits in a first-in-first-out queue, in; what
// falls out of it unused is remembered in out; an entry that comes back while it is remembered was worth keeping and
// goes to main, which is in order of last use. Uses while an entry waits in the first queue do not count: they belong to
// the same burst.
//
// T. Johnson, D. Shasha, 2Q: A Low Overhead High Performance Buffer Management Replacement Algorithm, VLDB 1994, the
// full version, with its Kin = 25 % and Kout = 50 % of the capacity.
//
// The host asks for victims before it says what they make room for. 2Q chooses without looking at that, so nothing is
// lost; out is cut to its size after the new entry was looked for in it, which is the paper's order.
//
// O(1) per event.
package twoq

import (
	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/plugins/internal/slots"
)

// Config keys, in percent of the capacity.
const (
	ConfigIn  = "in"
	ConfigOut = "out"
)

const (
	in   slots.List = 1 + iota // A1in
	main                       // Am
	out                        // A1out: ghosts
)

// Policy is a [guest.Evictor].
type Policy struct {
	t    *slots.Table
	kin  uint64
	kout uint64
}

// New makes an empty policy.
func New(info guest.Info) (*Policy, error) {
	inPercent, err := info.Config.Int(ConfigIn, 25, 0, 100)
	if err != nil {
		return nil, err
	}
	outPercent, err := info.Config.Int(ConfigOut, 50, 0, 200)
	if err != nil {
		return nil, err
	}
	t, err := slots.NewTable(info.MaxSlots, slots.Ghosts(info.MaxSlots, uint32(outPercent))+info.MaxVictims, out)
	if err != nil {
		return nil, err
	}
	capacity := info.Capacity / abi.SizeUnit
	return &Policy{t: t, kin: capacity * uint64(inPercent) / 100, kout: capacity * uint64(outPercent) / 100}, nil
}

// Events applies a batch.
func (p *Policy) Events(batch []abi.Event) { p.t.Apply(batch, p) }

// Touch is a hit: it counts in main.
func (p *Policy) Touch(slot uint32) {
	if p.t.In(slot) == main {
		p.t.Renew(slot)
	}
}

// Insert is a miss.
func (p *Policy) Insert(ev *abi.Event) {
	if ghost := p.t.Ghost(ev.Key); ghost != slots.None {
		p.t.DropGhost(ghost)
		p.t.Insert(ev, main)
	} else {
		p.t.Insert(ev, in)
	}
	p.t.TrimGhosts(out, p.kout)
}

// Remove remembers what in evicted.
func (p *Policy) Remove(slot uint32) {
	e := *p.t.At(slot)
	wasIn := p.t.In(slot) == in
	p.t.Remove(slot)
	if wasIn && p.t.Evicted(slot) {
		p.t.PushGhost(out, e.Key, e.Size)
	}
}

// Victims names from in while that is above its share, from main otherwise, and from the other when one has nothing
// that may be named.
func (p *Policy) Victims(ask abi.Ask, dst []uint32) int {
	a := p.t.Ask(ask, dst)
	oldIn, oldMain := p.t.Back(in), p.t.Back(main)
	for a.More() && (oldIn != slots.None || oldMain != slots.None) {
		at := &oldMain
		if oldIn != slots.None && (a.Left(in) > p.kin || oldMain == slots.None) {
			at = &oldIn
		}
		if a.May(*at) {
			a.Name(*at)
		}
		*at = p.t.Before(*at)
	}
	return a.Count()
}
