// Package arc is the first-party eviction policy "arc", the adaptive replacement cache. List t1 holds entries that were
// used once, and t2 those that were used again, both in order of last use. The ghost lists b1 and b2 hold the entries
// that have left t1 and t2. If an entry returns that is in b1, t1 was too small; if it is in b2, t2 was too small. The
// target p for the size of t1 changes accordingly.
//
// N. Megiddo, D. S. Modha, ARC: A Self-Tuning, Low Overhead Replacement Cache, FAST 2003, figure 4.
//
// There is one difference from the paper: the host asks for victims before it names the entry that needs the room. REPLACE
// therefore uses the p of the previous miss. Its tie rule for entries in b2 (take from t1 if it has exactly p) does not apply.
// The changes of b1 and b2 that the paper makes before REPLACE are made when the new entry is known.
//
// An event takes O(1).
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

// New returns an empty policy.
func New(info guest.Info) (*Policy, error) {
	t, err := slots.NewTable(info.MaxSlots, slots.Ghosts(info.MaxSlots, 100)+info.MaxVictims, b2)
	if err != nil {
		return nil, err
	}
	return &Policy{t: t, capacity: info.Capacity / abi.SizeUnit}, nil
}

// Events applies a batch.
func (p *Policy) Events(batch []abi.Event) { p.t.Apply(batch, p) }

// Touch handles a hit.
func (p *Policy) Touch(slot uint32) {
	if p.t.In(slot) == t2 {
		p.t.Renew(slot)
	} else {
		p.t.MoveFront(t2, slot)
	}
}

// Insert handles a miss.
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

// trim keeps |t1|+|b1| within c, and all four lists together within 2c.
func (p *Policy) trim() {
	p.t.TrimGhosts(b1, p.capacity-min(p.capacity, p.t.Units(t1)))
	p.t.TrimGhosts(b2, 2*p.capacity-min(2*p.capacity, p.t.Units(t1)+p.t.Units(t2)+p.t.Units(b1)))
}

// Remove makes an evicted entry a ghost.
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

// Victims is REPLACE. It takes the oldest entry of t1 while t1 is larger than its target, and otherwise the oldest of
// t2. If no entry of one list may be named, it takes from the other.
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
