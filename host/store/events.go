package store

import (
	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/policy"
	"github.com/kvhost/kvhost/host/store/index"
)

// Everything here runs under root.mu. The index has been changed before: see the package comment.

// event tells the evict policy about an entry.
func (r *root) event(op abi.Op, slot uint32, print uint64, parent, request uint32) {
	e := r.x.At(slot)
	r.send(abi.Event{
		Slot: slot, Parent: parent, Key: print, ParentKey: e.Parent(), Size: r.x.EntryUnits(slot, e), Depth: e.Depth(),
		Request: request, Tenant: r.tenantOf(slot), Op: op, Time: r.store.clock(),
	})
}

func (r *root) send(ev abi.Event) {
	if r.store.closed.Load() {
		return // a lease released late: there is no policy to tell any more
	}
	if ev.Op == abi.OpUnpin && len(r.foretold.slots) > 0 {
		r.foretold.unpinned(r.x.At(ev.Slot))
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
	e := r.x.At(slot)
	parent := r.x.FindFingerprint(e.Parent())
	if parent != index.None && !r.x.At(parent).Is(index.Announced) {
		parent = index.None
	}
	e.Set(index.Announced)
	r.event(op, slot, print, parent, request)
	r.x.Children(print, func(child uint32) {
		if r.x.At(child).Is(index.Announced) {
			r.event(abi.OpLink, child, r.x.Fingerprint(child), slot, request)
		}
	})
}

// pin keeps an entry from being a victim.
func (r *root) pin(slot uint32, print uint64, request uint32) {
	if r.x.Pin(slot) {
		r.event(abi.OpPin, slot, print, index.None, request)
	}
}

func (r *root) unpin(slot uint32, print uint64) {
	if !r.x.Unpin(slot) {
		return
	}
	if r.x.At(slot).Is(index.Evicting) {
		r.reap(slot)
		return
	}
	r.event(abi.OpUnpin, slot, print, index.None, 0)
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
	for _, slot := range r.x.ByLastTouch() {
		if r.standin != nil {
			return // it failed
		}
		print := r.x.Fingerprint(slot)
		r.announce(abi.OpResident, slot, print, 0)
		if r.x.At(slot).Pins() > 0 {
			r.event(abi.OpPin, slot, print, index.None, 0)
		}
	}
}
