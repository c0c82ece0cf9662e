package slots

// ghosts are the table's nodes above the slots: a list of free ones, threaded through their links, and chains of those
// with the same hash of their fingerprint.
type ghosts struct {
	free   uint32 // first of the nodes that were ghosts once, None for none
	fresh  uint32 // first of those that never were
	left   uint32 // free nodes, of both kinds
	chains Buckets
}

func (g *ghosts) init(first, n uint32) {
	g.free, g.fresh, g.left, g.chains = None, first, n, NewBuckets(n, None)
}

// home is the hash of a fingerprint. Fingerprints are hashes already; the multiplication guards against a host, or a
// test with fingerprints that count upwards.
func home(key uint64) uint32 { return uint32(key * 0x9e3779b97f4a7c15 >> 32) }

// Ghost is the ghost with this fingerprint, or None.
func (t *Table) Ghost(key uint64) uint32 {
	i := *t.chains.Of(home(key))
	for i != None {
		n := t.node(i)
		if n.Key == key {
			break
		}
		i = n.named
	}
	return i
}

// widen makes another chain, of ghosts of one that there is.
func (t *Table) widen() {
	old, made, bit, ok := t.chains.Add()
	if !ok {
		return
	}
	i := *old
	for *old = None; i != None; {
		n, to := t.node(i), old
		if home(n.Key)&bit != 0 {
			to = made
		}
		i, n.named, *to = n.named, *to, i
	}
}

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
		t.nodes.Make(i)
		t.widen()
	}
	head := t.chains.Of(home(key))
	t.node(i).Entry = Entry{Key: key, Size: size, named: *head}
	*head = i
	return i
}

// PushGhost remembers a fingerprint at the front of a list. The oldest ghost of the list is dropped when no node is free.
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
	at := t.chains.Of(home(n.Key))
	for *at != i {
		at = &t.node(*at).named
	}
	*at = n.named
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
