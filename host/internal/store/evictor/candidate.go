package evictor

import (
	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/store/index"
)

// candidate is a policy that is told what is here while another one decides. Events that happen meanwhile reach it too,
// so it can take over between any two of them.
type candidate struct {
	policy *policy.Evict
	told   []uint64 // slots it knows, a bit each
	whole  bool     // it knows all: it has the state of the active policy
	held   []abi.Event
	err    error
}

func (c *candidate) knows(slot uint32) bool {
	return int(slot/64) < len(c.told) && c.told[slot/64]&(1<<(slot%64)) != 0
}

func (c *candidate) note(slot uint32, known bool) {
	for int(slot/64) >= len(c.told) {
		c.told = append(c.told, 0)
	}
	if known {
		c.told[slot/64] |= 1 << (slot % 64)
	} else {
		c.told[slot/64] &^= 1 << (slot % 64)
	}
}

func (c *candidate) send(ev abi.Event) {
	switch {
	case c.err != nil:
	case c.policy == nil || len(c.held) > 0:
		c.held = append(c.held, ev)
	default:
		c.err = c.policy.Event(ev)
	}
}

// follow passes on an event that the active policy got. What it changes in an entry that the candidate does not know
// yet is in the index, and told with the entry: at once when it is a touch, because a later place in the order would be
// wrong.
func (c *candidate) follow(v *Evictor, ev abi.Event) {
	switch {
	case c.whole || ev.Op == abi.OpRequestEnd:
		c.send(ev)
		return
	case ev.Op == abi.OpInsert:
		c.note(ev.Slot, true)
	case !c.knows(ev.Slot):
		if ev.Op == abi.OpTouch {
			c.announce(v, ev.Slot, ev.Key)
		}
		return
	case ev.Op == abi.OpRemove:
		c.note(ev.Slot, false)
	case ev.Op == abi.OpResident:
		return // the active policy is new itself
	}
	if ev.Parent != index.None && !c.knows(ev.Parent) {
		if ev.Op == abi.OpLink {
			return
		}
		ev.Parent = index.None
	}
	c.send(ev)
}

// announce tells of an entry for the first time, and links the children that came before it.
func (c *candidate) announce(v *Evictor, slot uint32, fp uint64) {
	e := v.x.At(slot)
	cause := Cause{Tenant: v.tenant(slot), Time: v.cfg.Host.Clock()}
	var ev abi.Event
	v.write(&ev, abi.OpResident, slot, e, fp, &cause)
	if parent := v.x.FindFingerprint(ev.ParentKey); parent != index.None && c.knows(parent) {
		ev.Parent = parent
	}
	c.note(slot, true)
	c.send(ev)
	if e.Pins() > 0 {
		ev.Op, ev.Parent = abi.OpPin, index.None
		c.send(ev)
	}
	v.x.Children(fp, func(child uint32) {
		if e := v.x.At(child); c.knows(child) && child != slot {
			cause.Tenant = v.tenant(child)
			v.write(&ev, abi.OpLink, child, e, v.x.Fingerprint(child), &cause)
			ev.Parent = slot
			c.send(ev)
		}
	})
}
