package evictor

import (
	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/store/index"
)

// Cause is the request and the tenant that caused an event. Request is 0 if there is none.
type Cause struct {
	Request uint32
	Tenant  uint32
	Time    uint64
}

// write fills in an event of an entry.
func (v *Evictor) write(ev *abi.Event, op abi.Op, slot uint32, e *index.Entry, fp uint64, c *Cause) {
	ev.Slot, ev.Parent, ev.Key, ev.ParentKey = slot, index.None, fp, e.Parent()
	ev.Size, ev.Depth = v.x.EntryUnits(slot, e), e.Depth()
	ev.Request, ev.Tenant = c.Request, c.Tenant
	ev.SetOp(op)
	ev.Time = c.Time
}

// Post tells the policy about an event of an entry. If only the policy gets the event, it is written directly into the policy's
// buffer. Writing it elsewhere and copying it would take three times as long.
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

// canGo records that an entry of a tenant is new or can be evicted again.
func canGo(v *Evictor, e *index.Entry, tenant uint32) {
	v.queue.evictable(e)
	v.instead.evictable(tenant)
	if v.fallback != nil {
		v.fallback.evictable(tenant)
	}
}

// Tell is Post with the entry's own tenant and a request as the cause.
func (v *Evictor) Tell(op abi.Op, slot uint32, fp uint64, request uint32) {
	v.Post(op, slot, v.x.At(slot), fp, &Cause{Request: request, Tenant: v.tenant(slot), Time: v.cfg.Host.Clock()})
}

// tellOf tells the policy about an entry and its parent.
func (v *Evictor) tellOf(op abi.Op, slot uint32, fp uint64, parent, request uint32) {
	var ev abi.Event
	v.write(&ev, op, slot, v.x.At(slot), fp, &Cause{Request: request, Tenant: v.tenant(slot), Time: v.cfg.Host.Clock()})
	ev.Parent = parent
	v.send(ev)
}

// EndRequest tells the policy that a request has ended. It takes the lock.
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

// Announce tells the policy about an entry for the first time. op is INSERT or RESIDENT. Children that the policy knows are
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

// Describe links an entry that the policy knows to its parent, which has become known. The policy is not told the entry's
// tenant: announcing the entry again would make it the newest. If victims of a tenant are needed, its least recently touched
// entries go instead.
func (v *Evictor) Describe(slot uint32, fp uint64) {
	parent := v.x.FindFingerprint(v.x.At(slot).Parent())
	if parent != index.None && v.x.At(slot).Is(index.Announced) && v.x.At(parent).Is(index.Announced) {
		v.tellOf(abi.OpLink, slot, fp, parent, 0)
	}
}

// Pin keeps an entry from being evicted.
func (v *Evictor) Pin(slot uint32, fp uint64, request uint32) {
	if v.x.Pin(slot) {
		v.Tell(abi.OpPin, slot, fp, request)
	}
}
