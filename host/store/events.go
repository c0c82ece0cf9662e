package store

import (
	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/policy"
)

// Everything here runs under root.mu. The index has been changed before: see the package comment.

// event tells the evict policy about an entry.
func (r *root) event(op abi.Op, slot uint32, print uint64, parent, request uint32) {
	e := r.x.at(slot)
	r.send(abi.Event{
		Slot: slot, Parent: parent, Key: print, ParentKey: e.parentPrint(), Size: r.x.unitsOf(slot, e), Depth: e.depth(),
		Request: request, Tenant: r.tenantOf(slot), Op: op, Time: r.store.clock(),
	})
}

func (r *root) send(ev abi.Event) {
	if r.store.closed.Load() {
		return // a lease released late: there is no policy to tell any more
	}
	if ev.Op == abi.OpUnpin && len(r.foretold.slots) > 0 {
		r.foretold.unpinned(r.x.at(ev.Slot))
	}
	if r.standin == nil && !r.scanning {
		if err := r.evict.Event(ev); err != nil {
			r.replace(err)
		}
	}
	if r.next != nil {
		r.next.follow(r, ev)
	}
}

// direct says whether events go to the acting policy, and to nobody else.
func (r *root) direct() bool {
	return r.standin == nil && r.next == nil && !r.scanning && !r.store.closed.Load()
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
	if r.x.pin(slot) {
		r.event(abi.OpPin, slot, print, none, request)
	}
}

func (r *root) unpin(slot uint32, print uint64) {
	if !r.x.unpin(slot) {
		return
	}
	if r.x.at(slot).is(stLeaving) {
		r.settle(slot)
		return
	}
	r.event(abi.OpUnpin, slot, print, none, 0)
}

// ask is for victims, best first: of the policy, or of recency while that is down.
func (r *root) ask(a abi.Ask, dst []uint32) int {
	r.count.asks++
	if r.standin == nil {
		n, err := r.evict.Victims(a, dst)
		if err == nil {
			return n
		}
		if r.replace(err); r.standin == nil {
			return 0
		}
	}
	return r.oldest(a, dst)
}

// replace lets recency answer in the place of a policy that failed. The policy is started again when its module says so.
func (r *root) replace(cause error) {
	r.count.policyFaults++
	verdict, pause := r.acting.Module.Failed(abi.RoleEvict, cause)
	if verdict == policy.Halt {
		return // every call fails until the host has ended
	}
	r.log.Error("evict policy failed; recency decides", "policy", r.acting.Name, "error", cause)
	_ = r.evict.Close()
	r.standin = &recency{}
	if verdict == policy.Restart && r.store.run.Err() == nil {
		failed := r.acting
		r.store.work.Go(func() { r.revive(failed, pause) })
	}
}

// replay tells a new policy of all entries, in order of last touch: at the start, when nobody waits.
func (r *root) replay() {
	for _, slot := range r.x.byTouch() {
		if r.standin != nil {
			return // it failed
		}
		print := r.x.slotPrint(slot)
		r.announce(abi.OpResident, slot, print, 0)
		if r.x.at(slot).pins > 0 {
			r.event(abi.OpPin, slot, print, none, 0)
		}
	}
}
