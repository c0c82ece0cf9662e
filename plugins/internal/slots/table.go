package slots

import (
	"fmt"

	"github.com/kvhost/kvhost/abi"
)

// Entry is what is known about one slot, or about one ghost.
type Entry struct {
	Key    uint64
	Size   uint32 // units
	Tenant uint32
	named  uint32 // number of the question that last named it, 0 for none; of a ghost, the next of its chain
	pins   uint16
	list   uint8 // 0: not here
	Mark   uint8 // the policy's own: a visited bit, a small counter
}

type node struct {
	Entry
	links
}

// links are one node's neighbours in its list.
type links struct{ prev, next uint32 }

// List names one of a table's lists. List 0 is no list.
type List uint8

// None is the absent node.
const None = abi.None

// maxLists is how many lists a table can have, list 0 included.
const maxLists = 8

type sum struct {
	len   uint32
	units uint64
	named uint64 // units named by the question being answered
}

// Table is the entries of every slot and ghost, and the lists they are in.
//
// Nodes are reached without the checks of a slice. That is sound because node numbers never come from outside: links are
// the table's own, and a slot in an event is compared with the number of slots by [Table.Resident] or [Table.Insert]
// before anything else is done with it.
type Table struct {
	nodes Array[node] // of all slots, ghosts and lists' ends
	slots uint32
	ends  uint32 // node of list 0's ends; list l's are l further
	asks  uint32
	sums  [maxLists]sum
	ghosts
}

// maxNodes keeps node numbers, ends included, well within u32.
const maxNodes = 1 << 31

// NewTable makes room for slots below maxSlots, for so many ghosts, and for the lists 1 to lists.
func NewTable(maxSlots, maxGhosts uint32, lists List) (*Table, error) {
	if maxSlots == 0 {
		return nil, fmt.Errorf("slots: an eviction policy needs slots, MaxSlots is 0")
	}
	if uint64(maxSlots)+uint64(maxGhosts) > maxNodes {
		return nil, fmt.Errorf("slots: %d slots and %d ghosts are too many", maxSlots, maxGhosts)
	}
	if lists >= maxLists {
		return nil, fmt.Errorf("slots: %d lists are too many", lists)
	}
	t := &Table{slots: maxSlots, ends: maxSlots + maxGhosts}
	t.nodes = NewArray(t.ends+uint32(lists)+1, node{})
	for end := t.ends; end < t.nodes.Len(); end++ {
		t.nodes.Make(end).links = links{end, end}
	}
	t.ghosts.init(maxSlots, maxGhosts)
	return t, nil
}

// Ghosts is how many ghosts a policy should make room for when its paper wants a share of the capacity: percent of the
// slots, and one at least.
func Ghosts(maxSlots uint32, percent uint32) uint32 {
	return uint32(uint64(maxSlots)*uint64(percent)/100) + 1
}

func (t *Table) node(i uint32) *node { return t.nodes.At(i) }

// At is the entry of a slot that is the table's, or of a ghost.
func (t *Table) At(i uint32) *Entry { return &t.node(i).Entry }

// Resident says whether the slot is one of the table's and holds an entry.
func (t *Table) Resident(slot uint32) bool { return slot < t.slots && t.node(slot).list != 0 }

// In is the list that a node is in.
func (t *Table) In(i uint32) List { return List(t.node(i).list) }

// Insert notes a new entry at the front of a list. It says false when the event names no slot of the table. A slot
// that still held an entry forgets it first.
func (t *Table) Insert(ev *abi.Event, l List) bool {
	if ev.Slot >= t.slots {
		return false
	}
	n := t.nodes.Make(ev.Slot)
	if n.list != 0 {
		t.Remove(ev.Slot)
	}
	n.Entry = Entry{Key: ev.Key, Size: ev.Size, Tenant: ev.Tenant}
	t.PushFront(l, ev.Slot)
	return true
}

// Handler is what a policy does with the events of slots. Touch and Remove are for slots that hold an entry; Insert is for
// those that hold none, and below the table's number.
type Handler interface {
	Touch(slot uint32)
	Insert(ev *abi.Event)
	Remove(slot uint32)
}

// Apply passes a batch of events on to a policy. An insert over an entry removes that first. Pins are the table's. It takes
// a call per event, and so some hundredths more fuel than a loop of the policy's own: s3fifo, which hosts embed, has one.
func (t *Table) Apply(batch []abi.Event, p Handler) {
	for i := range batch {
		ev := &batch[i]
		switch ev.Op {
		case abi.OpTouch:
			if t.Resident(ev.Slot) {
				p.Touch(ev.Slot)
			}
		case abi.OpInsert, abi.OpResident:
			if t.Resident(ev.Slot) {
				p.Remove(ev.Slot)
			}
			if ev.Slot < t.slots {
				p.Insert(ev)
			}
		case abi.OpRemove:
			if t.Resident(ev.Slot) {
				p.Remove(ev.Slot)
			}
		case abi.OpPin, abi.OpUnpin:
			t.Pin(ev)
		}
	}
}

// Pin applies an OpPin or OpUnpin. Pins nest. An entry that is unpinned has the size that the event says: it was reserved
// before it was written, and compressed then.
func (t *Table) Pin(ev *abi.Event) {
	if !t.Resident(ev.Slot) {
		return
	}
	e := t.At(ev.Slot)
	switch {
	case ev.Op == abi.OpPin && e.pins < 1<<16-1:
		e.pins++
	case ev.Op == abi.OpUnpin && e.pins > 0:
		e.pins--
	}
	if ev.Op == abi.OpUnpin && ev.Size != e.Size && ev.Size != 0 {
		t.sums[t.node(ev.Slot).list%maxLists].units += uint64(ev.Size) - uint64(e.Size)
		e.Size = ev.Size
	}
}

// PushFront links a node that is in no list.
func (t *Table) PushFront(l List, i uint32) {
	n := t.node(i)
	n.list = uint8(l)
	s := &t.sums[l%maxLists]
	s.len++
	s.units += uint64(n.Size)
	t.link(n, i)
}

// link puts a lone node to the front of the list that it says it is in.
func (t *Table) link(n *node, i uint32) {
	end := t.ends + uint32(n.list)
	e := t.node(end)
	front := e.next
	n.prev, n.next = end, front
	e.next = i
	t.node(front).prev = i
}

// Remove takes a node out of its list; a slot is then not resident.
func (t *Table) Remove(i uint32) {
	n := t.node(i)
	s := &t.sums[n.list%maxLists]
	s.len--
	s.units -= uint64(n.Size)
	n.list = 0
	t.node(n.prev).next = n.next
	t.node(n.next).prev = n.prev
}

// Renew takes a node to the front of the list that it is in.
func (t *Table) Renew(i uint32) {
	n := t.node(i)
	t.node(n.prev).next = n.next
	t.node(n.next).prev = n.prev
	t.link(n, i)
}

// MoveFront takes a node from the list that it is in to the front of another.
func (t *Table) MoveFront(l List, i uint32) {
	t.Remove(i)
	t.PushFront(l, i)
}

// Back is the last node of a list, or None.
func (t *Table) Back(l List) uint32 { return t.Before(t.ends + uint32(l)) }

// Before is the node before i, towards the front, or None.
func (t *Table) Before(i uint32) uint32 {
	if i = t.node(i).prev; i < t.ends {
		return i
	}
	return None
}

// Rotate makes a node the back of the list that it is in; those behind it come to the front, in their order.
func (t *Table) Rotate(i uint32) {
	end := t.ends + uint32(t.node(i).list)
	e := t.node(end)
	t.node(e.prev).next = e.next
	t.node(e.next).prev = e.prev
	n := t.node(i)
	e.prev, e.next = i, n.next
	t.node(n.next).prev = end
	n.next = end
}

// Len is how many nodes a list has.
func (t *Table) Len(l List) uint32 { return t.sums[l%maxLists].len }

// Units is the sum of their sizes.
func (t *Table) Units(l List) uint64 { return t.sums[l%maxLists].units }
