package slots

// ghosts are the table's nodes above the slots: a free list, and an index from fingerprint to node by open addressing
// with linear probing. The index has at least twice as many places as there can be ghosts.
type ghosts struct {
	first uint32 // node of the first ghost
	free  []uint32
	index []uint32 // node + 1, 0 for empty
	mask  uint64
}

func (g *ghosts) init(first, n uint32) {
	if n == 0 {
		return
	}
	g.first = first
	g.free = make([]uint32, n)
	for i := range g.free {
		g.free[i] = first + n - 1 - uint32(i)
	}
	places := uint64(4)
	for places < 2*uint64(n) {
		places *= 2
	}
	g.index = make([]uint32, places)
	g.mask = places - 1
}

// home is a fingerprint's first place. Fingerprints are hashes already; the multiplication guards against a host, or a
// test, whose fingerprints count upwards.
func (g *ghosts) home(key uint64) uint64 { return (key * 0x9e3779b97f4a7c15) >> 20 & g.mask }

// Ghost is the ghost with this fingerprint, or None.
func (t *Table) Ghost(key uint64) uint32 {
	if len(t.index) == 0 {
		return None
	}
	for at := t.home(key); ; at = (at + 1) & t.mask {
		n := t.index[at]
		if n == 0 {
			return None
		}
		if t.entries[n-1].Key == key {
			return n - 1
		}
	}
}

// IsGhost says whether a node is a ghost.
func (t *Table) IsGhost(i uint32) bool { return i >= t.slots }

// GhostsFree is how many ghosts there is room for.
func (t *Table) GhostsFree() int { return len(t.free) }

// NewGhost makes a node that is in no list remember a fingerprint. An older ghost of the same fingerprint is dropped. It answers None when no
// node is free; policies drop their oldest ghost first.
func (t *Table) NewGhost(key uint64, size uint32) uint32 {
	if old := t.Ghost(key); old != None {
		t.DropGhost(old)
	}
	if len(t.free) == 0 {
		return None
	}
	i := t.free[len(t.free)-1]
	t.free = t.free[:len(t.free)-1]
	t.entries[i] = Entry{Key: key, Size: size}
	at := t.home(key)
	for t.index[at] != 0 {
		at = (at + 1) & t.mask
	}
	t.index[at] = i + 1
	return i
}

// PushGhost remembers a fingerprint at the front of a list, whose oldest ghost gives way when no node is free.
func (t *Table) PushGhost(l List, key uint64, size uint32) {
	if len(t.free) == 0 {
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
	if t.entries[i].list != 0 {
		t.Remove(i)
	}
	at := t.home(t.entries[i].Key)
	for t.index[at] != i+1 {
		at = (at + 1) & t.mask
	}
	t.close(at)
	t.free = append(t.free, i)
}

// close empties a place and moves up those behind it that would no longer be found.
func (t *Table) close(hole uint64) {
	for at := (hole + 1) & t.mask; t.index[at] != 0; at = (at + 1) & t.mask {
		home := t.home(t.entries[t.index[at]-1].Key)
		if (at-home)&t.mask >= (at-hole)&t.mask {
			t.index[hole] = t.index[at]
			hole = at
		}
	}
	t.index[hole] = 0
}

// TrimGhosts drops a list's oldest ghosts until its units are at most limit.
func (t *Table) TrimGhosts(l List, limit uint64) {
	for t.Units(l) > limit {
		t.DropGhost(t.Back(l))
	}
}
