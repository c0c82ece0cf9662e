package index

// A family is the set of entries with the same parent. It is found by the parent's fingerprint, whether or not the parent is
// resident. Most families are small and are stored in a table like the entries themselves. A family that outgrows its buckets,
// such as the chunks after a shared system prompt, moves to a set of its own, so that removing an entry costs the same in a
// large family as in a small one.

// smallFamily is the maximum number of children that are stored in the table. It is less than the 32 cells of a fingerprint,
// which other fingerprints share.
const smallFamily = 12

// families finds entries by their parent.
type families struct {
	small table                    // by the parent's fingerprint
	large map[uint64]*childSet     // by the parent's fingerprint
	of    func(slot uint32) uint64 // returns the fingerprint of an entry's parent; 0 if there is none
}

func (f *families) init(slots uint32, of func(slot uint32) uint64) {
	f.small.init(slots, of)
	f.large, f.of = map[uint64]*childSet{}, of
}

// add adds a slot to its parent's family.
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

// remove removes a slot from its parent's family.
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

// Children calls visit for each entry that has a parent with this fingerprint. visit must not add or detach entries.
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

// memory returns the size of the families in bytes.
func (f *families) memory() int64 {
	n := f.small.memory()
	for _, c := range f.large {
		n += int64(cap(c.cells))*4 + 64
	}
	return n
}

// childSet is a set of slots: a hash table with linear probing.
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

// add adds a slot that is not in the set.
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

// remove removes a slot that is in the set, and moves later cells into the gap.
func (c *childSet) remove(slot uint32) {
	gap := c.home(slot)
	for c.cells[gap] != slot {
		gap = c.next(gap)
	}
	for i := c.next(gap); c.cells[i] != emptyCell; i = c.next(i) {
		if c.distance(c.home(c.cells[i]), i) >= c.distance(gap, i) { // its home is not after the gap
			c.cells[gap] = c.cells[i]
			gap = i
		}
	}
	c.cells[gap] = emptyCell
	c.n--
}

// distance returns the number of steps from one cell to another.
func (c *childSet) distance(from, to int) int {
	if to < from {
		to += len(c.cells)
	}
	return to - from
}
