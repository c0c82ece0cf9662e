package store

import (
	"context"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/policy"
)

// Everything here runs under root.mu. The index has been changed before: see the package comment.

// event tells the evict policy about an entry.
func (r *root) event(op abi.Op, slot uint32, print uint64, parent, request uint32) {
	e := r.x.at(slot)
	r.send(abi.Event{
		Slot: slot, Parent: parent, Key: print, ParentKey: e.parentPrint(), Size: e.size, Depth: e.depth >> 8,
		Request: request, Tenant: r.store.spaces.tenantOf(e.tenant), Op: op, Time: r.store.clock(),
	})
}

func (r *root) send(ev abi.Event) {
	if r.store.closed.Load() {
		return // a lease released late: there is no policy to tell any more
	}
	if err := r.evict.Event(ev); err != nil {
		r.replace(err)
	}
	if r.next != nil {
		r.next.follow(r, ev)
	}
}

// announce tells of an entry for the first time: op is INSERT or RESIDENT. Children that are known already are linked.
func (r *root) announce(op abi.Op, slot uint32, print uint64, request uint32) {
	e := r.x.at(slot)
	parent := r.x.findPrint(e.parentPrint())
	if parent != none && !r.x.at(parent).is(stAnnounced) {
		parent = none
	}
	e.set(stAnnounced)
	r.event(op, slot, print, parent, request)
	r.x.children(print, func(child uint32) {
		if r.x.at(child).is(stAnnounced) {
			r.event(abi.OpLink, child, r.x.slotPrint(child), slot, request)
		}
	})
}

// pin keeps an entry from being a victim.
func (r *root) pin(slot uint32, print uint64, request uint32) {
	e := r.x.at(slot)
	if e.pins++; e.pins == 1 {
		r.event(abi.OpPin, slot, print, none, request)
	}
}

func (r *root) unpin(slot uint32, print uint64) {
	e := r.x.at(slot)
	if e.pins--; e.pins > 0 {
		return
	}
	if e.is(stLeaving) {
		r.settle(slot)
		return
	}
	r.event(abi.OpUnpin, slot, print, none, 0)
}

// replace puts the built-in policy in the place of one that failed, and tells it what is here. The configured one is
// started again when its module says so.
func (r *root) replace(cause error) {
	r.count.policyFaults++
	failed := r.store.cfg.Policies.Evict
	if r.standin {
		failed = policy.Builtin(abi.RoleEvict) // which does not fail, but who knows
	}
	verdict, pause := failed.Failed(abi.RoleEvict, cause)
	if verdict == policy.Halt {
		return // every call fails until the host has ended
	}
	r.log.Error("evict policy failed; the built-in one takes over", "policy", failed.Name(), "error", cause)
	r.faulted = addStats(r.faulted, r.evict.Stats())
	_ = r.evict.Close()
	next, err := r.newEvict(context.Background(), policy.Builtin(abi.RoleEvict), nil)
	if err != nil {
		r.log.Error("no evict policy: nothing will be evicted", "error", err)
		return
	}
	r.evict, r.standin = next, true
	r.replay()
	if verdict == policy.Restart && r.store.run.Err() == nil {
		r.store.work.Go(func() { r.revive(pause) })
	}
}

// replay tells a new policy of all entries, in order of last touch.
func (r *root) replay() {
	order := r.x.byTouch()
	r.x.each(func(_ uint32, e *entry) { e.unset(stAnnounced) })
	told := r.evict
	for _, slot := range order {
		if r.evict != told {
			return // it failed, and its successor was told everything
		}
		print := r.x.slotPrint(slot)
		r.announce(abi.OpResident, slot, print, 0)
		if r.x.at(slot).pins > 0 {
			r.event(abi.OpPin, slot, print, none, 0)
		}
	}
}
