package store

// Families: the entries that share a parent, found by the parent's fingerprint whether the parent is resident or not.
// Buckets of doubly linked chains through the entries, so that leaving a large family (the chunks after a shared system
// prompt) costs as little as leaving a small one. A bucket's chain mixes families; walks compare the fingerprint.

func (x *index) family(print uint64) (*shard, int) {
	t := &x.shards[print>>(64-shardBits)]
	if len(t.heads) == 0 {
		return t, -1
	}
	return t, home(print, len(t.heads))
}

// join puts a slot with a parent into its family.
func (x *index) join(slot uint32) {
	e := x.at(slot)
	print := e.parentPrint()
	if print == 0 {
		return
	}
	t, b := x.family(print)
	if t.kin >= 2*len(t.heads) {
		x.regroup(t)
		_, b = x.family(print)
	}
	t.kin++
	x.link(t, b, slot)
}

func (x *index) link(t *shard, b int, slot uint32) {
	e := x.at(slot)
	e.prev, e.next = none, t.heads[b]
	if e.next != none {
		x.at(e.next).prev = slot
	}
	t.heads[b] = slot
}

// part takes a slot out of its family.
func (x *index) part(slot uint32) {
	e := x.at(slot)
	print := e.parentPrint()
	if print == 0 {
		return
	}
	t, b := x.family(print)
	if e.prev == none {
		t.heads[b] = e.next
	} else {
		x.at(e.prev).next = e.next
	}
	if e.next != none {
		x.at(e.next).prev = e.prev
	}
	t.kin--
}

// regroup makes half as many buckets again.
func (x *index) regroup(t *shard) {
	old := t.heads
	t.heads = make([]uint32, max(4, len(old)+len(old)/2))
	for i := range t.heads {
		t.heads[i] = none
	}
	for _, slot := range old {
		for slot != none {
			e := x.at(slot)
			next := e.next
			x.link(t, home(e.parentPrint(), len(t.heads)), slot)
			slot = next
		}
	}
}

// children calls visit for each entry whose parent has this fingerprint. visit must not change families.
func (x *index) children(print uint64, visit func(slot uint32)) {
	t, b := x.family(print)
	if b < 0 || print == 0 {
		return
	}
	for slot := t.heads[b]; slot != none; {
		e := x.at(slot)
		next := e.next
		if e.parentPrint() == print {
			visit(slot)
		}
		slot = next
	}
}
