package prefix

import "github.com/kvhost/kvhost/plugins/internal/slots"

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
	slots            slots.Array[slot]
	segs             slots.Array[segment]
	used             uint32        // segments that were ever in use
	most             uint32        // segments that there may be for the slots that have memory
	free             uint32        // segments that were in use once, linked by right
	hash             slots.Buckets // ghosts by key, chained by right
	oldest, youngest uint32        // ghosts
}

// segmentsFor is how many segments a pool has, so many slots given.
func segmentsFor(slots uint32) uint32 { return slots/8*5 + 64 }

func (p *pool) init(maxSlots uint32) {
	most := segmentsFor(maxSlots)
	p.slots = slots.NewArray(maxSlots, slot{seg: none, parent: none})
	p.segs = slots.NewArray(most, segment{})
	p.hash = slots.NewBuckets(most, none)
	p.free, p.oldest, p.youngest = none, none, none
	p.most = segmentsFor(min(maxSlots, slots.PageLen))
}

// room makes a slot's memory, and lets there be as many more segments.
func (p *pool) room(i uint32) *slot {
	s := p.slots.Make(i)
	p.most = max(p.most, segmentsFor(p.slots.Made()))
	return s
}

// fresh is a segment that was not in use, or none.
func (p *pool) fresh() uint32 {
	if g := p.free; g != none {
		p.free = p.segs.At(g).right
		return g
	}
	if p.used >= p.most {
		return none
	}
	g := p.used
	p.used++
	p.segs.Make(g)
	p.rehash()
	return g
}

// rehash makes room for one more ghost in the table.
func (p *pool) rehash() {
	old, made, bit, ok := p.hash.Add()
	if !ok {
		return
	}
	g := *old
	for *old = none; g != none; {
		s, to := p.segs.At(g), old
		if ghostHash(s.key)&bit != 0 {
			to = made
		}
		g, s.right, *to = s.right, *to, g
	}
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

// newSegment makes an empty segment of request r, born now. When there is no room it forgets the oldest ghost; when
// there are none it returns false, and the caller joins a segment that is there.
func (p *Policy) newSegment(part uint8, r *request) (uint32, bool) {
	g := p.fresh()
	if g == none {
		p.forget()
		if g = p.fresh(); g == none {
			return none, false
		}
	}
	base := partBase(part, 0)
	*p.segs.At(g) = segment{birth: p.now, head: none, tail: none, request: r.id, base: base, level: levelOne, turn: 1, state: live}
	p.ageAdd(g)
	return g, true
}

// release returns a segment to the pool.
func (p *Policy) release(g uint32) {
	s := p.segs.At(g)
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

// toGhost keeps the memory of a segment after its last chunk, with that key, has been evicted.
func (p *Policy) toGhost(g uint32, key uint64) {
	s := p.segs.At(g)
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
	h := p.hash.Of(ghostHash(key))
	s.right, *h = *h, g
	s.head, s.tail = p.youngest, none
	if p.youngest == none {
		p.oldest = g
	} else {
		p.segs.At(p.youngest).tail = g
	}
	p.youngest = g
}

func ghostHash(key uint64) uint32 { return uint32(key * 0x9E3779B97F4A7C15 >> 32) }

// ghostFind is the ghost of the segment with that key of its shallowest chunk, or none.
//
//go:noinline
func (p *pool) ghostFind(key uint64) uint32 {
	g := *p.hash.Of(ghostHash(key))
	for g != none && p.segs.At(g).key != key {
		g = p.segs.At(g).right
	}
	return g
}

func (p *pool) ghostDel(g uint32) {
	s := p.segs.At(g)
	at := p.hash.Of(ghostHash(s.key))
	for *at != g {
		at = &p.segs.At(*at).right
	}
	*at = s.right
	if s.head == none {
		p.oldest = s.tail
	} else {
		p.segs.At(s.head).tail = s.tail
	}
	if s.tail == none {
		p.youngest = s.head
	} else {
		p.segs.At(s.tail).head = s.head
	}
}

// forget drops the ghost that was evicted longest ago, if there is one.
func (p *Policy) forget() {
	if g := p.oldest; g != none {
		p.model.forgotten(p.segs.At(g))
		p.release(g)
	}
}
