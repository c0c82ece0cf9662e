package prefix

import "testing"

// check recomputes from the slots and segments, the slow way, everything that the policy keeps incrementally.
func (p *Policy) check(t *testing.T) {
	t.Helper()
	kids := make([]uint32, int(p.slots.Len()))
	held := make([]uint32, int(p.segs.Len()))
	for i := range p.slots.Len() {
		s := p.slots.At(i)
		if s.seg == none {
			continue
		}
		held[s.seg]++
		if q := p.parentOf(i); q != none {
			if p.slots.At(q).seg == none {
				t.Fatalf("slot %d: its parent %d is not resident", i, q)
			}
			kids[q]++
		}
	}
	for i := range p.slots.Len() {
		if p.slots.At(i).seg != none && p.slots.At(i).kids != kids[i] {
			t.Fatalf("slot %d: %d kids, counted %d", i, p.slots.At(i).kids, kids[i])
		}
	}
	listed := p.checkLists(t)
	ghosts, free := 0, 0
	for g := p.free; g != none; g = p.segs.At(g).right {
		free++
	}
	for g := range p.used {
		s := p.segs.At(g)
		if !s.is(live) {
			free--
			continue
		}
		p.checkSegment(t, g, held[g])
		if s.is(ghost) {
			ghosts++
			if p.ghostFind(s.key) != g {
				t.Fatalf("ghost %d is not found by its key", g)
			}
		}
		if s.is(candidate) != listed[g] {
			t.Fatalf("segment %d: candidate %v, listed %v", g, s.is(candidate), listed[g])
		}
	}
	if free != 0 {
		t.Fatalf("free list is off by %d", free)
	}
	for g := p.oldest; g != none; g = p.segs.At(g).tail {
		ghosts--
	}
	if ghosts != 0 {
		t.Fatalf("queue of ghosts is off by %d", ghosts)
	}
}

// checkSegment checks one segment's own list and whether it may be a candidate.
func (p *Policy) checkSegment(t *testing.T, g, held uint32) {
	t.Helper()
	s := p.segs.At(g)
	if s.n != held {
		t.Fatalf("segment %d: n is %d, counted %d", g, s.n, held)
	}
	if s.is(ghost) {
		return
	}
	if s.n == 0 {
		t.Fatalf("segment %d is empty and no ghost", g)
	}
	var n uint32
	last := none
	for i := s.head; i != none; i = p.slots.At(i).next {
		if p.slots.At(i).seg != g || p.slots.At(i).prev != last {
			t.Fatalf("segment %d: its list is broken at slot %d", g, i)
		}
		last = i
		n++
	}
	if n != s.n || last != s.tail {
		t.Fatalf("segment %d: its list has %d slots and ends at %d", g, n, last)
	}
	tail := p.slots.At(s.tail)
	if may := tail.kids == 0 && tail.pins == 0 && !s.is(touching); may != s.is(candidate) {
		t.Fatalf("segment %d: candidate %v, should be %v", g, s.is(candidate), may)
	}
}

// checkLists checks cells, buckets of age and the tournament, and returns the candidates.
func (p *Policy) checkLists(t *testing.T) map[uint32]bool {
	t.Helper()
	listed := map[uint32]bool{}
	for c := range p.cells {
		want := uint32(never)
		for g := p.cells[c].first; g != none; g = p.segs.At(g).right {
			if p.cellOf(p.segs.At(g)) != uint32(c) {
				t.Fatalf("segment %d is in cell %d, belongs to %d", g, c, p.cellOf(p.segs.At(g)))
			}
			listed[g] = true
			want = p.worth(uint32(c))
		}
		if p.tree[leaves+c] != want {
			t.Fatalf("cell %d stands at %d, want %d", c, p.tree[leaves+c], want)
		}
	}
	for i := leaves - 1; i > 0; i-- {
		if p.tree[i] != min(p.tree[2*i], p.tree[2*i+1]) {
			t.Fatalf("match %d is wrong", i)
		}
	}
	aged := 0
	for b := range p.ages {
		if (p.ages[b].first != none) != (p.aged>>b&1 == 1) {
			t.Fatalf("bucket %d: bit is wrong", b)
		}
		for g := p.ages[b].first; g != none; g = p.segs.At(g).younger {
			if int(p.segs.At(g).bucket) != b {
				t.Fatalf("segment %d is in bucket list %d, says %d", g, b, p.segs.At(g).bucket)
			}
			aged++
		}
	}
	for g := range p.used {
		if p.segs.At(g).is(live) {
			aged--
		}
	}
	if aged != 0 {
		t.Fatalf("lists of age are off by %d", aged)
	}
	return listed
}
