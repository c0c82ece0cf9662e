// Package arc is the first-party eviction policy "arc", the adaptive replacement cache: t1 holds entries used once, t2
// those used again, both in order of last use; b1 and b2 remember what left them. An entry that comes back while b1
// remembers it says that t1 was too small, one in b2 that t2 was, and the target p for t1's size moves accordingly.
//
// N. Megiddo, D. S. Modha, ARC: A Self-Tuning, Low Overhead Replacement Cache, FAST 2003, figure 4.
//
// One difference from the paper: the host asks for victims before it says what they make room for, so REPLACE works with
// p as the previous miss left it, and its tie rule for entries in b2 (take from t1 when it has exactly p) does not apply.
// What the paper does to b1 and b2 before REPLACE is done when the new entry is known.
//
// O(1) per event.
package arc

import (
	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/plugins/internal/slots"
)

const (
	t1 slots.List = 1 + iota
	t2
	b1 // ghosts
	b2 // ghosts
)

// Policy is a [guest.Evictor].
type Policy struct {
	t        *slots.Table
	capacity uint64 // c
	target   uint64 // p
}

// New makes an empty policy.
func New(info guest.Info) (*Policy, error) {
	t, err := slots.NewTable(info.MaxSlots, slots.Ghosts(info.MaxSlots, 100)+info.MaxVictims, b2)
	if err != nil {
		return nil, err
	}
	return &Policy{t: t, capacity: info.Capacity / abi.SizeUnit}, nil
}

// Events applies a batch.
func (p *Policy) Events(batch []abi.Event) { p.t.Apply(batch, p) }

// Touch is a hit.
func (p *Policy) Touch(slot uint32) {
	if p.t.In(slot) == t2 {
		p.t.Renew(slot)
	} else {
		p.t.MoveFront(t2, slot)
	}
}

// Insert is a miss.
func (p *Policy) Insert(ev *abi.Event) {
	ghost := p.t.Ghost(ev.Key)
	if ghost == slots.None {
		p.t.Insert(ev, t1)
		p.trim()
		return
	}
	size := uint64(ev.Size)
	ones, twos := p.t.Units(b1), p.t.Units(b2)
	if p.t.In(ghost) == b1 {
		p.target = min(p.capacity, p.target+size*max(1, twos/max(1, ones)))
	} else {
		p.target -= min(p.target, size*max(1, ones/max(1, twos)))
	}
	p.t.DropGhost(ghost)
	p.t.Insert(ev, t2)
}

// trim keeps |t1|+|b1| within c and all four lists within 2c.
func (p *Policy) trim() {
	p.t.TrimGhosts(b1, p.capacity-min(p.capacity, p.t.Units(t1)))
	p.t.TrimGhosts(b2, 2*p.capacity-min(2*p.capacity, p.t.Units(t1)+p.t.Units(t2)+p.t.Units(b1)))
}

// Remove remembers what was evicted.
func (p *Policy) Remove(slot uint32) {
	e := *p.t.At(slot)
	to := b1
	if p.t.In(slot) == t2 {
		to = b2
	}
	p.t.Remove(slot)
	if p.t.Evicted(slot) {
		p.t.PushGhost(to, e.Key, e.Size)
	}
}

// Victims is REPLACE: the oldest of t1 while that is above its target, of t2 otherwise, and of the other when one has
// nothing that may be named.
func (p *Policy) Victims(ask abi.Ask, dst []uint32) int {
	a := p.t.Ask(ask, dst)
	old1, old2 := p.t.Back(t1), p.t.Back(t2)
	for a.More() && (old1 != slots.None || old2 != slots.None) {
		at := &old2
		if old1 != slots.None && (a.Left(t1) > p.target || old2 == slots.None) {
			at = &old1
		}
		if a.May(*at) {
			a.Name(*at)
		}
		*at = p.t.Before(*at)
	}
	return a.Count()
}
