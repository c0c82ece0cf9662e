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
	named  uint32 // number of the question that last named it, 0 for none
	pins   uint16
	list   uint8 // 0: not here
	Mark   uint8 // the policy's own: a visited bit, a small counter
}

// List names one of a table's lists. List 0 is no list.
type List uint8

// None is the absent node.
const None = abi.None

type sum struct {
	len   uint32
	units uint64
	named uint64 // units named by the question being answered
}

// Table is the entries of every slot and ghost, and the lists they are in.
type Table struct {
	ring    Ring
	entries []Entry
	sums    []sum // by list
	slots   uint32
	ends    uint32 // node of list 0's ends; list l's are l further
	asks    uint32
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
	nodes := maxSlots + maxGhosts
	t := &Table{
		ring:    NewRing(nodes + uint32(lists) + 1),
		entries: make([]Entry, nodes),
		sums:    make([]sum, lists+1),
		slots:   maxSlots,
		ends:    nodes,
	}
	t.ghosts.init(maxSlots, maxGhosts)
	return t, nil
}

// Ghosts is how many ghosts a policy should make room for when its paper wants a share of the capacity: percent of the
// slots, and one at least.
func Ghosts(maxSlots uint32, percent uint32) uint32 {
	return uint32(uint64(maxSlots)*uint64(percent)/100) + 1
}

// At is the entry of a node.
func (t *Table) At(i uint32) *Entry { return &t.entries[i] }

// Resident says whether the slot is one of the table's and holds an entry.
func (t *Table) Resident(slot uint32) bool { return slot < t.slots && t.entries[slot].list != 0 }

// In is the list that a node is in.
func (t *Table) In(i uint32) List { return List(t.entries[i].list) }

// Insert notes a new entry at the front of a list. It says false when the event names no slot of the table. A slot
// that still held an entry forgets it first.
func (t *Table) Insert(ev *abi.Event, l List) bool {
	if ev.Slot >= t.slots {
		return false
	}
	if t.entries[ev.Slot].list != 0 {
		t.Remove(ev.Slot)
	}
	t.entries[ev.Slot] = Entry{Key: ev.Key, Size: ev.Size, Tenant: ev.Tenant}
	t.PushFront(l, ev.Slot)
	return true
}

// Pin applies an OpPin or OpUnpin. Pins nest.
func (t *Table) Pin(ev *abi.Event) {
	if !t.Resident(ev.Slot) {
		return
	}
	e := &t.entries[ev.Slot]
	switch {
	case ev.Op == abi.OpPin && e.pins < 1<<16-1:
		e.pins++
	case ev.Op == abi.OpUnpin && e.pins > 0:
		e.pins--
	}
}

// PushFront links a node that is in no list.
func (t *Table) PushFront(l List, i uint32) {
	t.ring.InsertAfter(t.ends+uint32(l), i)
	t.enter(l, i)
}

// PushBack links a node that is in no list.
func (t *Table) PushBack(l List, i uint32) {
	t.ring.InsertAfter(t.ring.Prev(t.ends+uint32(l)), i)
	t.enter(l, i)
}

func (t *Table) enter(l List, i uint32) {
	e := &t.entries[i]
	e.list = uint8(l)
	s := &t.sums[l]
	s.len++
	s.units += uint64(e.Size)
}

// Remove takes a node out of its list; a slot is then not resident.
func (t *Table) Remove(i uint32) {
	e := &t.entries[i]
	s := &t.sums[e.list]
	s.len--
	s.units -= uint64(e.Size)
	e.list = 0
	t.ring.Remove(i)
}

// MoveFront takes a node from where it is to the front of a list.
func (t *Table) MoveFront(l List, i uint32) {
	if e := &t.entries[i]; e.list == uint8(l) {
		t.ring.Remove(i)
		t.ring.InsertAfter(t.ends+uint32(l), i)
		return
	}
	t.Remove(i)
	t.PushFront(l, i)
}

// Back is the last node of a list, or None.
func (t *Table) Back(l List) uint32 { return t.node(t.ring.Prev(t.ends + uint32(l))) }

// Front is the first node of a list, or None.
func (t *Table) Front(l List) uint32 { return t.node(t.ring.Next(t.ends + uint32(l))) }

// Before is the node before i, towards the front, or None.
func (t *Table) Before(i uint32) uint32 { return t.node(t.ring.Prev(i)) }

func (t *Table) node(i uint32) uint32 {
	if i >= t.ends {
		return None
	}
	return i
}

// Len is how many nodes a list has.
func (t *Table) Len(l List) uint32 { return t.sums[l].len }

// Units is the sum of their sizes.
func (t *Table) Units(l List) uint64 { return t.sums[l].units }
