package prefix

import "github.com/kvhost/kvhost/plugins/internal/slots"

// segment is a run of chunks that one request touched last, or the ghost of one that was evicted.
type segment struct {
	key, tip   uint64 // for a ghost, the key of its shallowest chunk; the key of the last whole chunk that its request reached
	birth      uint32 // tick at which its request touched it
	head, tail uint32 // slots of the shallowest and the deepest chunk; for a ghost, the next older and the next younger ghost
	older      uint32 // older and younger link all segments in a bucket of age, by birth
	younger    uint32
	left       uint32 // left and right link the candidates in a cell, by birth; for a ghost, right links its hash chain
	right      uint32
	n          uint32 // number of resident chunks
	request    uint32
	end        uint32 // depth of its request's last chunk
	short      uint8  // end minus the depth of the segment's own deepest chunk, when the segment was complete; far means at least that much
	base       uint8  // baseline of its hazard
	level      uint8
	bucket     uint8 // bucket of age
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

// pool holds the slots, the segments of their chunks, and the ghosts of evicted segments. It maintains the lists and the hash
// table, and makes no decisions.
type pool struct {
	slots            slots.Array[slot]
	segs             slots.Array[segment]
	used             uint32        // number of segments ever used
	most             uint32        // most segments for the slots that have memory
	free             uint32        // segments that can be reused, linked by right
	hash             slots.Buckets // ghosts by key, chained by right
	oldest, youngest uint32        // ghosts
}

// segmentsFor returns the number of segments of a pool with the given number of slots.
func segmentsFor(slots uint32) uint32 { return slots/8*5 + 64 }

func (p *pool) init(maxSlots uint32) {
	most := segmentsFor(maxSlots)
	p.slots = slots.NewArray(maxSlots, slot{seg: none, parent: none})
	p.segs = slots.NewArray(most, segment{})
	p.hash = slots.NewBuckets(most, none)
	p.free, p.oldest, p.youngest = none, none, none
	p.most = segmentsFor(min(maxSlots, slots.PageLen))
}

// room allocates the memory of a slot, and raises the limit of segments accordingly.
func (p *pool) room(i uint32) *slot {
	s := p.slots.Make(i)
	p.most = max(p.most, segmentsFor(p.slots.Made()))
	return s
}

// fresh returns an unused segment, or none.
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

// rehash extends the hash table for one more ghost.
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

// Each loop is a function of its own, because the meter of a module charges the length of the whole function at each
// iteration.

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

// newSegment returns an empty segment of request r, with the present time as its birth. If there is no room, it drops
// the oldest ghost. If there is no ghost, it returns false, and the caller must join an existing segment.
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

// toGhost makes a segment a ghost after its last chunk, with the given key, was evicted.
func (p *Policy) toGhost(g uint32, key uint64) {
	s := p.segs.At(g)
	p.unname(g)
	if basePart(s.base) == partOrphan { // a return without its parent would prove nothing
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

// ghostFind returns the ghost of the segment with this key of its shallowest chunk, or none.
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

// forget drops the ghost that was evicted first, if there is one.
func (p *Policy) forget() {
	if g := p.oldest; g != none {
		p.model.forgotten(p.segs.At(g))
		p.release(g)
	}
}
