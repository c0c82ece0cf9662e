// Package slotlist keeps slots in an order: newest at the front, oldest at the back.
//
// It is an intrusive list in one slot-indexed array: every event is O(1), and the list costs 16 bytes for each slot up to
// the highest that was used, in pages that are allocated with the first use of one of their slots. It tracks pinned slots and
// returns victims from the back. Policies that keep one order (lru, fifo) are a loop around it.
package slotlist

import (
	"unsafe"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/plugins/internal/slots"
)

// Bits of node.state. The rest of it is the entry's size in abi.SizeUnit, which saturates.
const (
	resident = 1 << 31
	pinned   = 1 << 30
	passed   = 1 << 29 // Victims found it pinned at the back and starts beyond it
	sizeMask = passed - 1
)

type node struct {
	newer  uint32 // stored together with older: see link
	older  uint32
	state  uint32
	tenant uint32
}

// List is an order over the slots below the number given to [New]. Slots out of range, and operations on a slot that
// is not in the list, are ignored: the host is trusted to order its events, not relied on for memory safety.
type List struct {
	nodes slots.Array[node] // the last one is the root: its older is the newest slot, its newer the oldest
	root  uint32
	ready uint32 // slots below have memory
	top   uint32 // no slot from here on was ever in the list
	done  uint32 // the newest of the pinned run at the back that Victims need not visit again, or root
}

// New makes an empty list for slots below maxSlots.
func New(maxSlots uint32) List {
	l := List{nodes: slots.NewArray(maxSlots+1, node{}), root: maxSlots, done: maxSlots}
	*l.nodes.Make(maxSlots) = node{newer: maxSlots, older: maxSlots}
	return l
}

// Apply applies a batch of events; a touch moves its slot to the front when touch is set. The common case of each common
// op is inlined in the loop, without calls, slice checks or nil checks, and the newest slot stays in a register: in a Go
// guest each branch and each memory access costs more than the work itself. Links stay inside the array, because only the
// slots of events come from outside, and they are checked against the number of slots.
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

// link sets both links with one store. (Hosts and guests are little-endian.)
func (n *node) link(newer, older uint32) {
	*(*uint64)(unsafe.Pointer(n)) = uint64(older)<<32 | uint64(newer)
}

// at is node i, which the caller has compared with the root or found as a link.
func at(base unsafe.Pointer, i uint32) *node { return slots.At[node](base, i) }

// apply is any event, of a slot below the root. One that is inserted while it is there moves to the front and loses its pin;
// one that is pinned keeps its place.
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
			l.done = l.root // it may stand anywhere in the run
		}
		n.state &^= pinned | passed
	}
}

// grown is the node of a slot that is about to be used.
func (l *List) grown(slot uint32) *node {
	n := l.nodes.Make(slot)
	for l.ready < l.root && l.nodes.Has(l.ready) {
		l.ready = min(l.root, l.ready+slots.PageLen)
	}
	l.top = max(l.top, l.ready, slot+1)
	return n
}

// maxPassed bounds the slots that one call of Victims passes over, so that it ends soon even when a hundred thousand
// slots at the back are pinned.
const maxPassed = 4096

// Victims writes the oldest unpinned slots to dst: as many as it takes to free ask.Bytes, at most ask.MaxVictims, and
// only those of ask.Tenant when it names one. Slots pinned at the back are visited once, not once per call; another
// tenant's older slots are walked over each time. After passing over maxPassed slots it answers what it has.
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

// remove takes a slot that is there out, and out of the run at the back.
func (l *List) remove(slot uint32, n *node) {
	if slot == l.done {
		l.done = n.older
	}
	l.nodes.At(n.newer).older = n.older
	l.nodes.At(n.older).newer = n.newer
	n.state = 0
}
