package store

// Families: the entries that share a parent, found by the parent's fingerprint whether the parent is resident or not. Most
// are small and stand in a table like the entries themselves. One that outgrows its buckets (the chunks after a shared
// system prompt) moves to a set of its own, so that leaving a large family costs as little as leaving a small one.

// smallFamily is the most that stand in the table: a part of the 32 cells that their fingerprint has there.
const smallFamily = 12

// join puts a slot with a parent into its family.
func (x *index) join(slot uint32) {
	print := x.at(slot).parentPrint()
	if print == 0 {
		return
	}
	c := x.crowds[print]
	if c == nil {
		var kin []uint32
		x.children(print, func(s uint32) { kin = append(kin, s) })
		if len(kin) < smallFamily && x.kin.insert(print, slot) {
			return
		}
		c = &crowd{}
		for _, s := range kin {
			x.kin.remove(print, s)
			c.add(s)
		}
		x.crowds[print] = c
	}
	c.add(slot)
}

// part takes a slot out of its family.
func (x *index) part(slot uint32) {
	print := x.at(slot).parentPrint()
	if print == 0 {
		return
	}
	c := x.crowds[print]
	if c == nil {
		x.kin.remove(print, slot)
		return
	}
	c.remove(slot)
	if c.n == 0 {
		delete(x.crowds, print)
	}
}

// children calls visit for each entry whose parent has this fingerprint. visit must not change families.
func (x *index) children(print uint64, visit func(slot uint32)) {
	if print == 0 {
		return
	}
	if c := x.crowds[print]; c != nil {
		for _, s := range c.cells {
			if s != emptyCell {
				visit(s)
			}
		}
		return
	}
	x.kin.seek(print, func(s uint32) bool {
		if x.at(s).parentPrint() == print {
			visit(s)
		}
		return false
	})
}

// crowd is a set of slots: open addressing, linear probing.
type crowd struct {
	cells []uint32
	n     int
}

func (c *crowd) home(slot uint32) int {
	return int(uint64(slot*0x9e3779b1) * uint64(len(c.cells)) >> 32)
}

func (c *crowd) next(i int) int {
	if i++; i < len(c.cells) {
		return i
	}
	return 0
}

// add puts in a slot that is not there.
func (c *crowd) add(slot uint32) {
	if 8*(c.n+1) > 7*len(c.cells) {
		old := c.cells
		c.n, c.cells = 0, cellsFor(len(old)*5/4/bucketCells+1)
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
func (c *crowd) remove(slot uint32) {
	gap := c.home(slot)
	for c.cells[gap] != slot {
		gap = c.next(gap)
	}
	for i := c.next(gap); c.cells[i] != emptyCell; i = c.next(i) {
		if c.way(c.home(c.cells[i]), i) >= c.way(gap, i) { // its home is not behind the gap
			c.cells[gap] = c.cells[i]
			gap = i
		}
	}
	c.cells[gap] = emptyCell
	c.n--
}

// way is how many steps it is from one cell to another.
func (c *crowd) way(from, to int) int {
	if to < from {
		to += len(c.cells)
	}
	return to - from
}
