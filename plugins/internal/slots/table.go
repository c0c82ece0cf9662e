package slots

import (
	"fmt"

	"github.com/kvhost/kvhost/abi"
)

// Entry holds the facts about one slot or one ghost.
type Entry struct {
	Key    uint64
	Size   uint32 // size in units
	Tenant uint32
	named  uint32 // number of the answer that last named the entry, 0 for none; for a ghost, the next one in its chain
	pins   uint16
	list   uint8 // list of the entry; 0 means none
	Mark   uint8 // for the policy's use: a visited bit or a small counter
}

type node struct {
	Entry
	links
}

// links are the neighbours of a node in its list.
type links struct{ prev, next uint32 }

// List is the number of one of a table's lists. 0 stands for no list.
type List uint8

// None stands for no node.
const None = abi.None

// maxLists is the maximum number of lists of a table, including list 0.
const maxLists = 8

type sum struct {
	len   uint32
	units uint64
	named uint64 // units named by the present answer
}

// Table holds the entries of all slots and ghosts, and their lists.
//
// Nodes are accessed without the checks of a slice. This is safe because node numbers never come from outside. Links belong to
// the table, and [Table.Resident] or [Table.Insert] compares the slot of an event with the number of slots before the slot is
// used.
type Table struct {
	nodes Array[node] // nodes of all slots, ghosts and ends of lists
	slots uint32
	ends  uint32 // node of the ends of list 0; that of list l is l further
	asks  uint32
	sums  [maxLists]sum
	ghosts
}

// maxNodes keeps node numbers, including ends, well within u32.
const maxNodes = 1 << 31

// NewTable returns a table for slots below maxSlots, maxGhosts ghosts, and the lists 1 to lists.
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

// Ghosts returns the number of ghosts that is the given percentage of the slots, and at least one. The papers of some
// policies state it as such a share.
func Ghosts(maxSlots uint32, percent uint32) uint32 {
	return uint32(uint64(maxSlots)*uint64(percent)/100) + 1
}

func (t *Table) node(i uint32) *node { return t.nodes.At(i) }

// At returns the entry of a valid slot or of a ghost.
func (t *Table) At(i uint32) *Entry { return &t.node(i).Entry }

// Resident reports whether a slot is valid and has an entry.
func (t *Table) Resident(slot uint32) bool { return slot < t.slots && t.node(slot).list != 0 }

// In returns the list of a node.
func (t *Table) In(i uint32) List { return List(t.node(i).list) }

// Insert adds a new entry at the front of a list. It returns false if the event's slot is not valid. If the slot has an
// entry already, that entry is removed first.
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

// Handler is the reaction of a policy to the events of slots. Touch and Remove are called for slots with an entry. Insert is
// called for valid slots without one.
type Handler interface {
	Touch(slot uint32)
	Insert(ev *abi.Event)
	Remove(slot uint32)
}

// Apply passes the events of a batch to a policy. It removes an existing entry before an insert, and handles pins itself. It
// makes a call for each event, which takes a few percent more fuel than a loop in the policy itself. s3fifo, which hosts embed,
// therefore has its own loop.
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

// Pin applies an OpPin or OpUnpin. Pins nest. At an unpin the entry gets the size in the event, because a compressed entry
// takes fewer units than were reserved for it.
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

// PushFront adds a node without a list at the front of a list.
func (t *Table) PushFront(l List, i uint32) {
	n := t.node(i)
	n.list = uint8(l)
	s := &t.sums[l%maxLists]
	s.len++
	s.units += uint64(n.Size)
	t.link(n, i)
}

// link puts a node that is in no list at the front of the list that its field list names.
func (t *Table) link(n *node, i uint32) {
	end := t.ends + uint32(n.list)
	e := t.node(end)
	front := e.next
	n.prev, n.next = end, front
	e.next = i
	t.node(front).prev = i
}

// Remove takes a node out of its list. A slot is then not resident.
func (t *Table) Remove(i uint32) {
	n := t.node(i)
	s := &t.sums[n.list%maxLists]
	s.len--
	s.units -= uint64(n.Size)
	n.list = 0
	t.node(n.prev).next = n.next
	t.node(n.next).prev = n.prev
}

// Renew moves a node to the front of its list.
func (t *Table) Renew(i uint32) {
	n := t.node(i)
	t.node(n.prev).next = n.next
	t.node(n.next).prev = n.prev
	t.link(n, i)
}

// MoveFront moves a node from its list to the front of another.
func (t *Table) MoveFront(l List, i uint32) {
	t.Remove(i)
	t.PushFront(l, i)
}

// Back returns the last node of a list, or None.
func (t *Table) Back(l List) uint32 { return t.Before(t.ends + uint32(l)) }

// Before returns the node before i, towards the front, or None.
func (t *Table) Before(i uint32) uint32 {
	if i = t.node(i).prev; i < t.ends {
		return i
	}
	return None
}

// Rotate makes a node the last of its list. The nodes behind it move to the front in their order.
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

// Len returns the number of nodes of a list.
func (t *Table) Len(l List) uint32 { return t.sums[l%maxLists].len }

// Units returns the sum of the sizes in a list.
func (t *Table) Units(l List) uint64 { return t.sums[l%maxLists].units }
