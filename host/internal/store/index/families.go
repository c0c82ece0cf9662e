package index

// Entries that share a parent are found by the parent's fingerprint, whether the parent is resident or not. Most
// families are small and are in a table like the entries themselves. One that outgrows its buckets (the chunks after
// a shared system prompt) moves to a set by itself, so that leaving a large family costs as little as leaving a small
// one.

// smallFamily is the most children that are in the table: a part of the 32 cells that their fingerprint has there.
const smallFamily = 12

// families holds the entries that have a parent.
type families struct {
	small table                    // by the parent's fingerprint
	large map[uint64]*childSet     // by the parent's fingerprint
	of    func(slot uint32) uint64 // the fingerprint of an entry's parent; 0 for none
}

func (f *families) init(slots uint32, of func(slot uint32) uint64) {
	f.small.init(slots, of)
	f.large, f.of = map[uint64]*childSet{}, of
}

// add puts a slot into its parent's family.
func (f *families) add(slot uint32) {
	parent := f.of(slot)
	if parent == 0 {
		return
	}
	c := f.large[parent]
	if c == nil {
		if f.small.most(parent) < smallFamily || f.size(parent) < smallFamily {
			if f.small.insert(parent, slot) {
				return
			}
		}
		c = &childSet{}
		var siblings []uint32
		f.children(parent, func(s uint32) { siblings = append(siblings, s) })
		for _, s := range siblings {
			f.small.remove(parent, s)
			c.add(s)
		}
		f.large[parent] = c
	}
	c.add(slot)
}

func (f *families) size(parent uint64) (n int) {
	f.children(parent, func(uint32) { n++ })
	return n
}

// remove takes a slot out of its parent's family.
func (f *families) remove(slot uint32) {
	parent := f.of(slot)
	if parent == 0 {
		return
	}
	c := f.large[parent]
	if c == nil {
		f.small.remove(parent, slot)
		return
	}
	c.remove(slot)
	if c.n == 0 {
		delete(f.large, parent)
	}
}

// Children calls visit for each entry with a parent of this fingerprint. visit must not add or detach entries.
func (x *Index) Children(parent uint64, visit func(slot uint32)) { x.families.children(parent, visit) }

func (f *families) children(parent uint64, visit func(slot uint32)) {
	if parent == 0 {
		return
	}
	if c := f.large[parent]; c != nil {
		for _, s := range c.cells {
			if s != emptyCell {
				visit(s)
			}
		}
		return
	}
	f.small.search(parent, func(s uint32) bool {
		if f.of(s) == parent {
			visit(s)
		}
		return false
	})
}

// memory is the bytes that the families take.
func (f *families) memory() int64 {
	n := f.small.memory()
	for _, c := range f.large {
		n += int64(cap(c.cells))*4 + 64
	}
	return n
}

// childSet is a set of slots: open addressing, linear probing.
type childSet struct {
	cells []uint32
	n     int
}

func (c *childSet) home(slot uint32) int {
	return int(uint64(slot*0x9e3779b1) * uint64(len(c.cells)) >> 32)
}

func (c *childSet) next(i int) int {
	if i++; i < len(c.cells) {
		return i
	}
	return 0
}

// add puts in a slot that is not there.
func (c *childSet) add(slot uint32) {
	if 8*(c.n+1) > 7*len(c.cells) {
		old := c.cells
		c.n, c.cells = 0, newCells(len(old)*5/4/bucketCells+1)
		for _, s := range old {
			if s != emptyCell {
				c.add(s)
			}
		}
	}
	i := c.home(slot)
	for c.cells[i] != emptyCell {
		i = c.next(i)
	}
	c.cells[i] = slot
	c.n++
}

// remove takes out a slot that is there, and closes the gap.
func (c *childSet) remove(slot uint32) {
	gap := c.home(slot)
	for c.cells[gap] != slot {
		gap = c.next(gap)
	}
	for i := c.next(gap); c.cells[i] != emptyCell; i = c.next(i) {
		if c.distance(c.home(c.cells[i]), i) >= c.distance(gap, i) { // its home is not behind the gap
			c.cells[gap] = c.cells[i]
			gap = i
		}
	}
	c.cells[gap] = emptyCell
	c.n--
}

// distance is the number of steps from one cell to another.
func (c *childSet) distance(from, to int) int {
	if to < from {
		to += len(c.cells)
	}
	return to - from
}
