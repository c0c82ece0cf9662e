package slots

import "unsafe"

// ghosts are the table's nodes above the slots: a list of free ones, threaded through their links, and an index from
// fingerprint to node by open addressing with linear probing. The index has at least twice as many places as there can
// be ghosts.
type ghosts struct {
	free  uint32 // first of the nodes that were ghosts once, None for none
	fresh uint32 // first of those that never were
	left  uint32 // free nodes, of both kinds
	index unsafe.Pointer
	mask  uint64
}

func (g *ghosts) init(first, n uint32) {
	places := uint64(4)
	for places < 2*uint64(n) {
		places *= 2
	}
	g.index = unsafe.Pointer(unsafe.SliceData(make([]uint32, places)))
	g.mask = places - 1
	g.free, g.fresh, g.left = None, first, n
}

// place is where the index holds a node's number plus one, or 0 when it is empty.
func (g *ghosts) place(at uint64) *uint32 {
	return (*uint32)(unsafe.Add(g.index, uintptr(at&g.mask)*4))
}

// home is a fingerprint's first place. Fingerprints are hashes already; the multiplication guards against a host, or a
// test, whose fingerprints count upwards.
func home(key uint64) uint64 { return key * 0x9e3779b97f4a7c15 >> 20 }

// Ghost is the ghost with this fingerprint, or None.
func (t *Table) Ghost(key uint64) uint32 {
	for at := home(key); ; at++ {
		n := *t.place(at)
		if n == 0 {
			return None
		}
		if t.node(n-1).Key == key {
			return n - 1
		}
	}
}

// IsGhost says whether a node is a ghost.
func (t *Table) IsGhost(i uint32) bool { return i >= t.slots }

// GhostsFree is how many ghosts there is room for.
func (t *Table) GhostsFree() uint32 { return t.left }

// NewGhost makes a node that is in no list remember a fingerprint, which no other may remember. It answers None when no
// node is free; policies drop their oldest ghost first.
func (t *Table) NewGhost(key uint64, size uint32) uint32 {
	if t.left == 0 {
		return None
	}
	i := t.free
	if t.left--; i != None {
		t.free = t.node(i).next
	} else {
		i = t.fresh
		t.fresh++
	}
	n := t.node(i)
	n.Entry = Entry{Key: key, Size: size}
	at := home(key)
	for *t.place(at) != 0 {
		at++
	}
	*t.place(at) = i + 1
	return i
}

// PushGhost remembers a fingerprint at the front of a list, whose oldest ghost gives way when no node is free.
func (t *Table) PushGhost(l List, key uint64, size uint32) {
	if old := t.Ghost(key); old != None {
		t.DropGhost(old)
	}
	if t.left == 0 {
		if old := t.Back(l); old != None {
			t.DropGhost(old)
		}
	}
	if i := t.NewGhost(key, size); i != None {
		t.PushFront(l, i)
	}
}

// DropGhost forgets a ghost and takes it out of its list.
func (t *Table) DropGhost(i uint32) {
	n := t.node(i)
	if n.list != 0 {
		t.Remove(i)
	}
	at := home(n.Key)
	for *t.place(at) != i+1 {
		at++
	}
	// Those behind it that would no longer be found move up.
	for hole := at; ; {
		at++
		m := *t.place(at)
		if m == 0 {
			*t.place(hole) = 0
			break
		}
		if (at-home(t.node(m-1).Key))&t.mask >= (at-hole)&t.mask {
			*t.place(hole) = m
			hole = at
		}
	}
	n.next = t.free
	t.free = i
	t.left++
}

// maxTrimmed is how many ghosts one event forgets at most. Entries may have very different sizes, and an event's work is
// bounded; the rest goes with the following events.
const maxTrimmed = 16

// TrimGhosts drops a list's oldest ghosts until its units are at most limit.
func (t *Table) TrimGhosts(l List, limit uint64) {
	for n := 0; n < maxTrimmed && t.Units(l) > limit; n++ {
		t.DropGhost(t.Back(l))
	}
}
