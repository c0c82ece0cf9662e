package prefix

import (
	"math"
	"math/rand/v2"
	"testing"
)

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

func TestBucketOf(t *testing.T) {
	var m model
	m.init()
	for b := 1; b < buckets; b++ {
		e := m.edge[b]
		if e >= 1<<31 {
			break
		}
		if m.edge[b+1] <= e {
			t.Fatalf("bucket %d is empty", b)
		}
		if got := int(bucketOf(uint32(e))); got != b {
			t.Errorf("age %d is in bucket %d, want %d", e, got, b)
		}
		if got := int(bucketOf(uint32(e - 1))); got >= b {
			t.Errorf("age %d is in bucket %d, want below %d", e-1, got, b)
		}
	}
	if bucketOf(0) != 0 || bucketOf(math.MaxUint32) != buckets-1 {
		t.Error("the first and the last bucket do not hold the extremes")
	}
}

func TestLog(t *testing.T) {
	var l logTable
	l.init()
	r := rand.New(rand.NewPCG(1, 2))
	for range 10000 {
		x := r.Uint64() >> r.IntN(63)
		if x == 0 {
			continue
		}
		got, want := float64(l.of(x))/lgOne, math.Log2(float64(x))
		if math.Abs(got-want) > 0.001 {
			t.Fatalf("log2(%d) is %f, want %f", x, got, want)
		}
	}
}

// The index against its definition: the best ratio over all horizons, by brute force in floating point.
func TestIndexIsTheBestRatio(t *testing.T) {
	var m model
	m.init()
	r := rand.New(rand.NewPCG(3, 4))
	for range 50 {
		for b := range m.hazard[0] {
			m.hazard[0][b] = uint32(r.ExpFloat64() * one / 10)
		}
		l := r.IntN(levels)
		m.fitRow(l)
		w := float64(m.levelW[l]) / weightOne
		var s, f, held [buckets + 1]float64
		s[0] = 1
		cum := 0.0
		for b := range buckets {
			cum += w * float64(m.hazard[0][b]) / one
			s[b+1] = 1 / (1 + cum)
			f[b+1] = f[b] + s[b] - s[b+1]
			held[b+1] = held[b] + (s[b]+s[b+1])/2*float64(m.edge[b+1]-m.edge[b])
		}
		first := m.log.of(slope(survivalOne, survivalOne<<12))
		for b := range buckets {
			best := 0.0
			for x := b + 1; x <= buckets; x++ {
				if held[x] > held[b] {
					best = max(best, (f[x]-f[b])/(held[x]-held[b]))
				}
			}
			got := float64(int32(m.index[l*buckets+b])-first)/lgOne - 12
			if want := math.Log2(best); math.Abs(got-want) > 0.02 {
				t.Fatalf("level %d bucket %d: index %f, want %f", l, b, got, want)
			}
		}
	}
}
