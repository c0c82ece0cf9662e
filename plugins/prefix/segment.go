package prefix

import "math/bits"

// segment is a run of chunks that one request touched last, or the ghost of one that was evicted.
type segment struct {
	key, tip   uint64 // ghost: key of its shallowest chunk; key of the last whole chunk its request reached
	birth      uint32 // when its request touched it, in ticks
	head, tail uint32 // slots, shallowest and deepest; ghost: older and younger ghost
	older      uint32 // list of all segments in a bucket of age, by birth
	younger    uint32
	left       uint32 // list of the candidates in a cell, by birth; ghost: hash chain in right
	right      uint32
	n          uint32 // resident chunks
	request    uint32
	end        uint32 // depth of its request's last chunk
	short      uint8  // end minus the depth of the segment's own deepest chunk, when it was made; far: that or more
	base       uint8  // baseline of its hazard
	level      uint8
	bucket     uint8 // of age
	feature    [features]uint8
	turn       uint8
	state      uint8
}

const far = 255

// State bits of a segment.
const (
	live      = 1 << iota // in use
	ghost                 // all its chunks were evicted
	candidate             // listed in a cell
	touching              // a request is touching its chunks one by one
)

func (s *segment) row() int            { return rowOf(int(s.base), int(s.level)) }
func (s *segment) is(bits uint8) bool  { return s.state&bits == bits }
func (s *segment) any(bits uint8) bool { return s.state&bits != 0 }

// pool holds the slots, the segments that their chunks belong to, and the ghosts of evicted segments. It keeps the lists
// and the hash table, and decides nothing.
type pool struct {
	slots            []slot
	segs             []segment
	free             uint32   // segments not in use, linked by right
	hash             []uint32 // ghosts by key, chained by right
	hashShift        uint8
	oldest, youngest uint32 // ghosts
}

func (p *pool) init(slots, segments uint32) {
	p.slots, p.segs = make([]slot, slots), make([]segment, segments)
	hashBits := bits.Len32(segments - 1)
	p.hashShift = uint8(64 - hashBits)
	p.hash = make([]uint32, 1<<hashBits)
	p.oldest, p.youngest = none, none
	clearWords(p.hash)
	clearSlots(p.slots)
	p.free = chainFree(p.segs)
}

// Each loop has a function, because the meter of a module charges the length of the whole function at each iteration.

//go:noinline
func clearWords(w []uint32) {
	for i := range w {
		w[i] = none
	}
}

//go:noinline
func clearCells(c []cell) {
	for i := range c {
		c[i] = cell{none, none}
	}
}

//go:noinline
func clearSlots(s []slot) {
	for i := range s {
		s[i].seg, s[i].parent = none, none
	}
}

//go:noinline
func chainFree(s []segment) uint32 {
	free := none
	for g := len(s) - 1; g >= 0; g-- {
		s[g].right = free
		free = uint32(g)
	}
	return free
}

// newSegment makes an empty segment of request r, born now. When there is no room it forgets the oldest ghost; when
// there are none it returns false, and the caller joins a segment that is there.
func (p *Policy) newSegment(part uint8, r *request) (uint32, bool) {
	if p.free == none {
		p.forget()
	}
	g := p.free
	if g == none {
		return none, false
	}
	p.free = p.segs[g].right
	base := partBase(part, 0)
	p.segs[g] = segment{birth: p.now, head: none, tail: none, request: r.id, base: base, level: levelOne, turn: 1, state: live}
	p.ageAdd(g)
	return g, true
}

// release returns a segment to the pool.
func (p *Policy) release(g uint32) {
	s := &p.segs[g]
	p.cellDel(g)
	p.ageDel(g)
	if s.is(ghost) {
		p.ghostDel(g)
	} else {
		p.unname(g)
	}
	*s = segment{right: p.free}
	p.free = g
}

// toGhost keeps the memory of a segment whose last chunk, with that key, has been evicted.
func (p *Policy) toGhost(g uint32, key uint64) {
	s := &p.segs[g]
	p.unname(g)
	if basePart(s.base) == partOrphan { // coming back without its parent would prove nothing
		p.model.forgotten(s)
		p.release(g)
		return
	}
	p.cellDel(g)
	if old := p.ghostFind(key); old != none {
		p.release(old)
	}
	s.state = live | ghost
	s.key = key
	h := p.ghostHash(key)
	s.right = p.hash[h]
	p.hash[h] = g
	s.head, s.tail = p.youngest, none
	if p.youngest == none {
		p.oldest = g
	} else {
		p.segs[p.youngest].tail = g
	}
	p.youngest = g
}

func (p *pool) ghostHash(key uint64) uint32 {
	return uint32(key * 0x9E3779B97F4A7C15 >> p.hashShift)
}

// ghostFind is the ghost of a segment whose shallowest chunk has that key, or none.
//
//go:noinline
func (p *pool) ghostFind(key uint64) uint32 {
	g := p.hash[p.ghostHash(key)]
	for g != none && p.segs[g].key != key {
		g = p.segs[g].right
	}
	return g
}

func (p *pool) ghostDel(g uint32) {
	s := &p.segs[g]
	at := &p.hash[p.ghostHash(s.key)]
	for *at != g {
		at = &p.segs[*at].right
	}
	*at = s.right
	if s.head == none {
		p.oldest = s.tail
	} else {
		p.segs[s.head].tail = s.tail
	}
	if s.tail == none {
		p.youngest = s.head
	} else {
		p.segs[s.tail].head = s.head
	}
}

// forget drops the ghost that was evicted longest ago, if there is one.
func (p *Policy) forget() {
	if g := p.oldest; g != none {
		p.model.forgotten(&p.segs[g])
		p.release(g)
	}
}
