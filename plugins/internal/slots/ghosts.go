package slots

// ghosts manages the nodes of the table above the slots. It has a list of the free ones, linked through the nodes, and
// chains of ghosts with the same hash of their fingerprint.
type ghosts struct {
	free   uint32 // first free node that was a ghost before, or None
	fresh  uint32 // first free node that was never used
	left   uint32 // number of free nodes of both kinds
	chains Buckets
}

func (g *ghosts) init(first, n uint32) {
	g.free, g.fresh, g.left, g.chains = None, first, n, NewBuckets(n, None)
}

// home returns the hash of a fingerprint. Fingerprints are hashes already. The multiplication protects against a host
// or a test with consecutive fingerprints.
func home(key uint64) uint32 { return uint32(key * 0x9e3779b97f4a7c15 >> 32) }

// Ghost returns the ghost with this fingerprint, or None.
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

// widen adds a chain and moves ghosts of an existing chain to it.
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

// NewGhost returns a new ghost with a fingerprint, which no other ghost may have. The ghost is in no list. It returns
// None if no node is free, which policies avoid by dropping their oldest ghost first.
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

// PushGhost adds a ghost at the front of a list. If no node is free, it drops the oldest ghost of the list.
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

// DropGhost frees a ghost and takes it out of its list.
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

// maxTrimmed is the maximum number of ghosts that one event drops, because the work of an event is limited and sizes of entries
// may differ greatly. Later events drop the rest.
const maxTrimmed = 16

// TrimGhosts drops the oldest ghosts of a list until the list has at most limit units.
func (t *Table) TrimGhosts(l List, limit uint64) {
	for n := 0; n < maxTrimmed && t.Units(l) > limit; n++ {
		t.DropGhost(t.Back(l))
	}
}
