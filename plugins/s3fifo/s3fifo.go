// Package s3fifo is the first-party eviction policy "s3fifo". It has three first-in-first-out queues: small, main and
// ghost. New entries enter small. Entries that are used more than once there move on to main. The others are evicted,
// and their fingerprints enter ghost. If an entry returns while it is in ghost, it enters main at once. In main, each
// use gives an entry another round, up to three.
//
// J. Yang, Y. Zhang, Z. Qiu, Y. Yue, K. V. Rashmi, FIFO Queues are All You Need for Cache Eviction, SOSP 2023,
// algorithm 1: small is 10 % of the capacity, and ghost remembers as much as main holds.
//
// The host asks for victims before it names the entry that needs the room. The paper, too, evicts before it looks in
// ghost.
//
// An event takes O(1). An answer takes one step for each entry that it passes, and an entry is passed at most once for
// each use. After too many steps, the next entries are taken regardless of their uses.
package s3fifo

import (
	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/plugins/internal/slots"
)

// Configuration keys.
const (
	ConfigSmall  = "small"  // percent of the capacity
	ConfigMoveAt = "moveat" // uses in small after which an entry moves to main
)

const (
	small slots.List = 1 + iota
	main
	ghost
)

const maxUses = 3

// Policy is a [guest.Evictor]. An entry's Mark counts its uses, up to three.
type Policy struct {
	t      *slots.Table
	small  uint64 // units
	ghost  uint64
	moveAt uint8
}

// New returns an empty policy.
func New(info guest.Info) (*Policy, error) {
	percent, err := info.Config.Int(ConfigSmall, 10, 1, 99)
	if err != nil {
		return nil, err
	}
	moveAt, err := info.Config.Int(ConfigMoveAt, 2, 1, maxUses)
	if err != nil {
		return nil, err
	}
	ghosts := slots.Ghosts(info.MaxSlots, uint32(100-percent)) + info.MaxVictims
	t, err := slots.NewTable(info.MaxSlots, ghosts, ghost)
	if err != nil {
		return nil, err
	}
	capacity := info.Capacity / abi.SizeUnit
	part := capacity * uint64(percent) / 100
	return &Policy{t: t, small: part, ghost: capacity - part, moveAt: uint8(moveAt)}, nil
}

// Events applies a batch.
func (p *Policy) Events(batch []abi.Event) {
	for i := range batch {
		ev := &batch[i]
		switch ev.Op {
		case abi.OpTouch:
			if p.t.Resident(ev.Slot) {
				if e := p.t.At(ev.Slot); e.Mark < maxUses {
					e.Mark++
				}
			}
		case abi.OpInsert, abi.OpResident:
			p.insert(ev)
		case abi.OpRemove:
			p.remove(ev.Slot)
		case abi.OpPin, abi.OpUnpin:
			p.t.Pin(ev)
		}
	}
}

func (p *Policy) insert(ev *abi.Event) {
	if old := p.t.Ghost(ev.Key); old != slots.None {
		p.t.DropGhost(old)
		p.t.Insert(ev, main)
		return
	}
	p.t.Insert(ev, small)
}

func (p *Policy) remove(slot uint32) {
	if !p.t.Resident(slot) {
		return
	}
	e := *p.t.At(slot)
	wasSmall := p.t.In(slot) == small
	p.t.Remove(slot)
	if wasSmall && p.t.Evicted(slot) {
		p.t.PushGhost(ghost, e.Key, e.Size)
		p.t.TrimGhosts(ghost, p.ghost)
	}
}

// Victims evicts from small while it is at or above its share, and otherwise from main. If no entry of one queue may be
// named, it takes from the other.
func (p *Policy) Victims(ask abi.Ask, dst []uint32) int {
	a := p.t.Ask(ask, dst)
	oldSmall := p.t.Back(small)
	// Main is rotated as it is passed: an entry that gets another round moves to the front. An entry can get three
	// rounds and is visited once more to be named. Entries that come from small in the meantime are visited, too.
	rounds := (maxUses + 2) * (uint64(p.t.Len(main)) + uint64(p.t.Len(small)))
	for a.More() {
		switch {
		case oldSmall != slots.None && (a.Left(small) >= p.small || rounds == 0 || p.t.Len(main) == 0):
			oldSmall = p.fromSmall(&a, oldSmall)
		case rounds > 0 && p.t.Len(main) > 0:
			rounds--
			p.fromMain(&a, p.t.Back(main))
		default:
			a.NameFrom(p.t.Back(main))
			return a.Count()
		}
	}
	return a.Count()
}

// fromSmall handles one entry of small and returns the next one.
func (p *Policy) fromSmall(a *slots.Naming, at uint32) uint32 {
	before := p.t.Before(at)
	if a.May(at) {
		if e := p.t.At(at); e.Mark >= p.moveAt && a.Patient() {
			e.Mark = 0
			p.t.MoveFront(main, at)
			a.Hurry(2)
		} else {
			a.Name(at)
		}
	}
	return before
}

// fromMain handles the last entry of main, or a run of used entries there.
func (p *Policy) fromMain(a *slots.Naming, at uint32) {
	var next uint32
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
