// Package slotlist keeps slots in an order: newest at the front, oldest at the back.
//
// It is an intrusive list in one array indexed by slot. Every event takes O(1). The list takes 16 bytes for each slot up to the
// highest that was used, in pages that are allocated when one of their slots is first used. It tracks pinned slots and names
// victims from the back. Policies with a single order (lru, fifo) only call it.
package slotlist

import (
	"unsafe"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/plugins/internal/slots"
)

// Bits of node.state. The remaining bits are the size of the entry in abi.SizeUnit, which saturates.
const (
	resident = 1 << 31
	pinned   = 1 << 30
	passed   = 1 << 29 // the slot was pinned at the back, and Victims begins beyond it
	sizeMask = passed - 1
)

type node struct {
	newer  uint32 // stored together with older: see link
	older  uint32
	state  uint32
	tenant uint32
}

// List is an order of the slots below the number given to [New]. Slots out of range, and operations on a slot that is
// not in the list, are ignored. The order of events is the host's responsibility, but memory safety does not depend on
// it.
type List struct {
	nodes slots.Array[node] // the last one is the root: its older is the newest slot, and its newer is the oldest slot
	root  uint32
	ready uint32 // slots below this number have memory
	top   uint32 // no slot from this number on was ever in the list
	done  uint32 // newest slot of the pinned run at the back that Victims need not visit again, or root
}

// New returns an empty list for slots below maxSlots.
func New(maxSlots uint32) List {
	l := List{nodes: slots.NewArray(maxSlots+1, node{}), root: maxSlots, done: maxSlots}
	*l.nodes.Make(maxSlots) = node{newer: maxSlots, older: maxSlots}
	return l
}

// Apply applies a batch of events. With touch set, a touch moves its slot to the front. The common case of each common op is
// inlined in the loop without calls, slice checks or nil checks, and the newest slot stays in a register. In a Go guest, each
// branch and each memory access costs more than the work itself. Links stay inside the array, because only the slots of events
// come from outside, and these are compared with the number of slots.
func (l *List) Apply(batch []abi.Event, touch bool) {
	base := l.nodes.Pages()
	last, ready := l.root, l.ready
	newest := at(base, last).older
	for i := range batch {
		ev := &batch[i]
		slot := ev.Slot
		if slot >= last {
			continue
		}
		n := at(base, slot)
		op, state := ev.Op, n.state
		if state&(resident|passed) == resident {
			if op == abi.OpTouch {
				if !touch || slot == newest {
					continue
				}
				newer, older := n.newer, n.older
				at(base, newer).older = older
				at(base, older).newer = newer
				at(base, newest).newer = slot
				n.link(last, newest)
				newest = slot
				continue
			}
			if op == abi.OpPin {
				n.state = state | pinned
				continue
			}
			if op == abi.OpUnpin {
				n.state = state &^ pinned
				continue
			}
			if op == abi.OpRemove {
				newer, older := n.newer, n.older
				n.state = 0
				at(base, older).newer = newer
				if slot == newest {
					newest = older
					continue
				}
				at(base, newer).older = older
				continue
			}
		} else if state == 0 && op == abi.OpInsert && slot < ready {
			at(base, newest).newer = slot
			n.link(last, newest)
			n.state, n.tenant = resident|min(ev.Size, sizeMask), ev.Tenant
			newest = slot
			continue
		}
		at(base, last).older = newest
		l.apply(ev, touch)
		newest, ready = at(base, last).older, l.ready
	}
	at(base, last).older = newest
}

// link sets both links with one store. Hosts and guests are little-endian.
func (n *node) link(newer, older uint32) {
	*(*uint64)(unsafe.Pointer(n)) = uint64(older)<<32 | uint64(newer)
}

// at returns node i. The caller must have compared i with the root or found it as a link.
func at(base unsafe.Pointer, i uint32) *node { return slots.At[node](base, i) }

// apply applies any event with a slot below the root. If a slot that is in the list is inserted again, it moves to the front
// and loses its pin. A slot that is pinned keeps its place.
func (l *List) apply(ev *abi.Event, touch bool) {
	n := l.nodes.At(ev.Slot)
	state := n.state
	switch there := state&resident != 0; {
	case ev.Op == abi.OpInsert || ev.Op == abi.OpResident:
		if there {
			l.remove(ev.Slot, n)
		}
		n = l.grown(ev.Slot)
		n.tenant = ev.Tenant
		l.pushFront(ev.Slot, n, resident|min(ev.Size, sizeMask))
	case !there:
	case ev.Op == abi.OpTouch && touch:
		l.remove(ev.Slot, n)
		l.pushFront(ev.Slot, n, state&^passed)
	case ev.Op == abi.OpRemove:
		l.remove(ev.Slot, n)
	case ev.Op == abi.OpPin:
		n.state |= pinned
	case ev.Op == abi.OpUnpin:
		if state&passed != 0 {
			l.done = l.root // the slot may be anywhere in the run
		}
		n.state &^= pinned | passed
	}
}

// grown returns the node of a slot that is about to be used, and allocates its memory if necessary.
func (l *List) grown(slot uint32) *node {
	n := l.nodes.Make(slot)
	for l.ready < l.root && l.nodes.Has(l.ready) {
		l.ready = min(l.root, l.ready+slots.PageLen)
	}
	l.top = max(l.top, l.ready, slot+1)
	return n
}

// maxPassed is the maximum number of slots that one call of Victims skips, so that it ends soon even if a hundred
// thousand slots at the back are pinned.
const maxPassed = 4096

// Victims writes the oldest unpinned slots to dst: as many as are needed to free ask.Bytes, and at most ask.MaxVictims.
// If ask.Tenant is a tenant, it takes only slots of that tenant. Slots that are pinned at the back are visited once and
// not in each call. Older slots of other tenants are visited each time. After skipping maxPassed slots, Victims returns
// the slots found so far.
func (l *List) Victims(ask abi.Ask, dst []uint32) int {
	limit := min(uint64(ask.MaxVictims), uint64(len(dst)))
	var n, freed uint64
	left := maxPassed
	run := true // every slot behind this one is pinned
	for s := l.nodes.At(l.done).newer; s != l.root && n < limit && freed < ask.Bytes; s = l.nodes.At(s).newer {
		v := l.nodes.At(s)
		if other := ask.Tenant != abi.None && v.tenant != ask.Tenant; other || v.state&pinned != 0 {
			if left--; left < 0 {
				break
			}
			if v.state&pinned == 0 {
				run = false
				continue
			}
			if run {
				v.state |= passed
				l.done = s
			}
			continue
		}
		run = false
		dst[n] = s
		n++
		freed += uint64(v.state&sizeMask) * abi.SizeUnit
	}
	return int(n)
}

func (l *List) pushFront(slot uint32, n *node, state uint32) {
	root := l.nodes.At(l.root)
	*n = node{newer: l.root, older: root.older, state: state, tenant: n.tenant}
	l.nodes.At(root.older).newer = slot
	root.older = slot
}

// remove removes a slot from the list, and from the pinned run at the back.
func (l *List) remove(slot uint32, n *node) {
	if slot == l.done {
		l.done = n.older
	}
	l.nodes.At(n.newer).older = n.older
	l.nodes.At(n.older).newer = n.newer
	n.state = 0
}
