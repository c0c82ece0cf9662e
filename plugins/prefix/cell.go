package prefix

import "math/bits"

// cell is the list of the candidate segments with the same baseline, weight level and bucket of age, oldest first. They
// have the same index, so a tournament over the cells that are not empty finds the next victim.
type cell struct{ first, last uint32 }

const (
	leaves = 1 << 14 // leaves of the tournament, at least one for each cell
	never  = 1<<32 - 1
)

// ranking orders the segments by their value. It holds the model, which gives each cell its index, and a tournament
// over the cells.
type ranking struct {
	pool
	model model
	now   uint32        // present time in ticks
	moves int           // segments that this call may still move to another bucket
	aged  uint64        // buckets of age that are not empty, as bits
	ages  [buckets]cell // all segments by age, oldest first
	cells [cells]cell   // candidates
	tree  [2 * leaves]uint32
}

func (p *ranking) init() {
	clearCells(p.ages[:])
	clearCells(p.cells[:])
	clearWords(p.tree[:])
	p.model.init()
}

func (p *ranking) cellOf(s *segment) uint32 {
	return uint32(s.row())*buckets + uint32(s.bucket)
}

func (p *ranking) worth(c uint32) uint32 { return p.model.index[c] }

// play sets the value of a cell in the tournament and replays its matches.
func (p *ranking) play(c, worth uint32) {
	t := &p.tree
	i := leaves + c
	t[i] = worth
	for i > 1 {
		w := min(t[i], t[i^1])
		i >>= 1
		if t[i] == w {
			return
		}
		t[i] = w
	}
}

// replay replays the matches of a row's cells after the row was fitted.
func (p *ranking) replay(row int) {
	for c := uint32(row * buckets); c < uint32(row*buckets+buckets); c++ {
		if p.cells[c].first != none {
			p.play(c, p.model.index[c])
		}
	}
}

// worst returns the cell of the segments with the least value, or none.
func (p *ranking) worst() uint32 {
	t := &p.tree
	if t[1] == never {
		return none
	}
	i := uint32(1)
	for i < leaves {
		i *= 2
		if t[i+1] < t[i] {
			i++
		}
	}
	return i - leaves
}

// cellWalk limits the search for a segment's place by birth. If it is reached, the order within the cell is only
// approximate.
const cellWalk = 8

func (p *ranking) cellAdd(g uint32) {
	s := p.segs.At(g)
	c := p.cellOf(s)
	l := &p.cells[c]
	at := l.last
	for k := 0; at != none && int32(p.segs.At(at).birth-s.birth) > 0; k++ {
		if at = p.segs.At(at).left; k == cellWalk {
			at = none // the segment is old for its cell, so it goes to the front
		}
	}
	s.left = at
	if at == none {
		s.right = l.first
		l.first = g
	} else {
		s.right = p.segs.At(at).right
		p.segs.At(at).right = g
	}
	if s.right == none {
		l.last = g
	} else {
		p.segs.At(s.right).left = g
	}
	s.state |= candidate
	if s.left == none && s.right == none {
		p.play(c, p.worth(c))
	}
}

func (p *ranking) cellDel(g uint32) {
	s := p.segs.At(g)
	if !s.is(candidate) {
		return
	}
	c := p.cellOf(s)
	l := &p.cells[c]
	if s.left == none {
		l.first = s.right
	} else {
		p.segs.At(s.left).right = s.right
	}
	if s.right == none {
		l.last = s.left
	} else {
		p.segs.At(s.right).left = s.left
	}
	s.state &^= candidate
	if l.first == none {
		p.play(c, never)
	}
}

// refresh makes segment g a candidate if its deepest chunk can be evicted. Otherwise it removes the segment from the
// candidates.
func (p *ranking) refresh(g uint32) {
	s := p.segs.At(g)
	may := s.n > 0 && !s.is(touching)
	if may {
		t := p.slots.At(s.tail)
		may = t.kids == 0 && t.pins == 0
	}
	if may != s.is(candidate) {
		if may {
			p.cellAdd(g)
		} else {
			p.cellDel(g)
		}
	}
}

// move changes the baseline and the level of a segment, which determine its cell.
func (p *ranking) move(g uint32, base, level uint8) {
	s := p.segs.At(g)
	if s.base == base && s.level == level {
		return
	}
	listed := s.is(candidate)
	p.cellDel(g)
	s.base, s.level = base, level
	if listed {
		p.cellAdd(g)
	}
}

// ageAdd appends a segment to the list of its bucket of age.
func (p *ranking) ageAdd(g uint32) {
	s := p.segs.At(g)
	l := &p.ages[s.bucket]
	s.older, s.younger = l.last, none
	if l.last == none {
		l.first = g
		p.aged |= 1 << s.bucket
	} else {
		p.segs.At(l.last).younger = g
	}
	l.last = g
}

func (p *ranking) ageDel(g uint32) {
	s := p.segs.At(g)
	l := &p.ages[s.bucket]
	if s.older == none {
		l.first = s.younger
	} else {
		p.segs.At(s.older).younger = s.younger
	}
	if s.younger == none {
		l.last = s.older
	} else {
		p.segs.At(s.younger).older = s.older
	}
	if l.first == none {
		p.aged &^= 1 << s.bucket
	}
}

// advance moves the segments that have outgrown their bucket to the next one. It begins with the oldest bucket, so that
// each list stays in order of birth. The end of a segment's stay in a bucket is recorded in the model. advance reports
// whether it has moved all of them.
func (p *ranking) advance() bool {
	for rest := p.aged &^ (1 << (buckets - 1)); rest != 0; {
		b := uint8(bits.Len64(rest) - 1)
		rest &^= 1 << b
		for g := p.ages[b].first; g != none; g = p.ages[b].first {
			s := p.segs.At(g)
			to := bucketOf(p.now - s.birth)
			if to <= b {
				break
			}
			if p.moves--; p.moves < 0 {
				return false
			}
			p.grow(g, to)
		}
	}
	return true
}

// grow moves a segment to an older bucket.
//
//go:noinline
func (p *ranking) grow(g uint32, to uint8) {
	s := p.segs.At(g)
	listed := s.is(candidate)
	p.cellDel(g)
	p.ageDel(g)
	p.model.aged(s, s.bucket, to)
	s.bucket = to
	p.ageAdd(g)
	if listed {
		p.cellAdd(g)
	}
}
