package evictor

import (
	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/store/index"
)

// Cause is the request and the tenant that cause an event. Request 0 is none.
type Cause struct {
	Request uint32
	Tenant  uint32
	Time    uint64
}

// write writes an event of an entry.
func (v *Evictor) write(ev *abi.Event, op abi.Op, slot uint32, e *index.Entry, fp uint64, c *Cause) {
	ev.Slot, ev.Parent, ev.Key, ev.ParentKey = slot, index.None, fp, e.Parent()
	ev.Size, ev.Depth = v.x.EntryUnits(slot, e), e.Depth()
	ev.Request, ev.Tenant = c.Request, c.Tenant
	ev.SetOp(op)
	ev.Time = c.Time
}

// Post tells the policy of something that happened to an entry. The event is written where the policy reads it, unless
// others get it too: to make it elsewhere and copy it takes three times as long.
func (v *Evictor) Post(op abi.Op, slot uint32, e *index.Entry, fp uint64, c *Cause) {
	if v.fallback != nil || v.candidate != nil || v.scanning || v.closed {
		var ev abi.Event
		v.write(&ev, op, slot, e, fp, c)
		v.send(ev)
		return
	}
	if op == abi.OpUnpin {
		canGo(v, e, c.Tenant)
	}
	v.write(v.policy.Next(), op, slot, e, fp, c)
	if err := v.policy.Commit(); err != nil {
		v.Fail(err)
	}
}

// canGo follows a tenant's entry that is new or can be evicted again.
func canGo(v *Evictor, e *index.Entry, tenant uint32) {
	v.queue.evictable(e)
	v.instead.evictable(tenant)
	if v.fallback != nil {
		v.fallback.evictable(tenant)
	}
}

// Tell is Post with the entry's own tenant as the cause, with the request given.
func (v *Evictor) Tell(op abi.Op, slot uint32, fp uint64, request uint32) {
	v.Post(op, slot, v.x.At(slot), fp, &Cause{Request: request, Tenant: v.tenant(slot), Time: v.cfg.Host.Clock()})
}

// tellOf tells of an entry and its parent.
func (v *Evictor) tellOf(op abi.Op, slot uint32, fp uint64, parent, request uint32) {
	var ev abi.Event
	v.write(&ev, op, slot, v.x.At(slot), fp, &Cause{Request: request, Tenant: v.tenant(slot), Time: v.cfg.Host.Clock()})
	ev.Parent = parent
	v.send(ev)
}

// EndRequest tells the policy that a request is over. It takes the lock.
func (v *Evictor) EndRequest(request uint32, hints abi.Hints, now uint64) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.send(abi.NewRequestEnd(request, abi.None, hints, now))
}

func (v *Evictor) send(ev abi.Event) {
	if v.closed {
		return
	}
	if ev.Op == abi.OpUnpin || ev.Op == abi.OpInsert || ev.Op == abi.OpResident {
		canGo(v, v.x.At(ev.Slot), ev.Tenant)
	}
	if v.fallback == nil && !v.scanning {
		if err := v.policy.Event(ev); err != nil {
			v.Fail(err)
		}
	}
	if v.candidate != nil {
		v.candidate.follow(v, ev)
	}
}

// Announce tells the policy of an entry for the first time: op is INSERT or RESIDENT. Children that it knows are
// linked.
func (v *Evictor) Announce(op abi.Op, slot uint32, fp uint64, request uint32) {
	e := v.x.At(slot)
	parent := v.x.FindFingerprint(e.Parent())
	if parent != index.None && !v.x.At(parent).Is(index.Announced) {
		parent = index.None
	}
	e.Set(index.Announced)
	v.tellOf(op, slot, fp, parent, request)
	v.x.Children(fp, func(child uint32) {
		if v.x.At(child).Is(index.Announced) {
			v.tellOf(abi.OpLink, child, v.x.Fingerprint(child), slot, request)
		}
	})
}

// Describe links an entry that the policy knows to the parent that is known by now. Its tenant is not told: told anew the entry
// would be the newest. Where a tenant's entries are asked for, those that were touched least recently go.
func (v *Evictor) Describe(slot uint32, fp uint64) {
	parent := v.x.FindFingerprint(v.x.At(slot).Parent())
	if parent != index.None && v.x.At(slot).Is(index.Announced) && v.x.At(parent).Is(index.Announced) {
		v.tellOf(abi.OpLink, slot, fp, parent, 0)
	}
}

// Pin keeps an entry from being a victim.
func (v *Evictor) Pin(slot uint32, fp uint64, request uint32) {
	if v.x.Pin(slot) {
		v.Tell(abi.OpPin, slot, fp, request)
	}
}
