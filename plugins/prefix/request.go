package prefix

import (
	"math/bits"

	"github.com/kvhost/kvhost/abi"
)

// request is the state of a request in progress: the chain of chunks that it has touched and inserted so far. If a
// request walks several chains (in several groups), they are handled one after the other.
type request struct {
	id      uint32
	open    bool
	begun   bool   // it has inserted a chunk
	reached bool   // it has reached the previous turn's tip
	under   bool   // it begins under a shared prefix
	turn    uint8  // 1 for the first
	seg     uint32 // segment that its chunks are added to at present
	found   uint32 // its segment of found chunks, if that is not seg
	from    uint32 // segment that it is touching
	fresh   bool   // the next chunk is the first one taken from that segment
	uses    uint8  // requests that have used that segment, including this one
	idle    uint32 // ticks since its previous use
	shares  int64  // depth down to which its inserted chunks are known to be evicted shared chunks
	last    uint32 // slot of its latest chunk
	up      bool   // it walks from the tail towards the root
	above   uint64 // key of the chunk above its last one, while it may walk upwards
	tip     uint64 // key of the last whole chunk of the previous turn
	before  uint32 // number of chunks of the previous turn
	branch  uint32 // depth of its first inserted chunk
	again   int64  // depth down to which its inserted chunks are known to be evicted chunks of the previous turn
	pause   uint32 // ticks since the previous turn
}

// requests is the number of requests in progress that can be distinguished. The low bits of the id select the place.
const requests = 256

func (p *Policy) request(id uint32) *request { return &p.open[id%requests] }

// chain returns the request of an event. It begins a new chain unless the event's chunk is the next one below its last
// chunk or, if the host walks from the tail upwards, the next one above.
func (p *Policy) chain(e *abi.Event, parent uint32) *request {
	r := p.request(e.Request)
	if r.open && r.id == e.Request {
		if parent != none && (parent == r.last || r.last == none) {
			r.up, r.above = false, 0
			return r
		}
		if e.Key == r.above && e.Key != 0 {
			r.up, r.above = true, e.ParentKey
			return r
		}
	}
	p.endChain(r)
	*r = request{id: e.Request, open: true, above: e.ParentKey, turn: 1, seg: none, found: none, from: none, last: none, again: -1, shares: -1}
	return r
}

// unname removes the references of requests to a segment that is being released.
func (p *Policy) unname(g uint32) {
	r := p.request(p.segs.At(g).request)
	if r.seg == g {
		r.seg = none
	}
	if r.found == g {
		r.found = none
	}
	if r.from == g {
		r.from = none
	}
}

// meet records the history of a segment when the request reaches its chunks.
func (r *request) meet(now uint32, s *segment) {
	r.fresh, r.uses, r.idle = true, min(s.turn+1, 250), now-s.birth
}

// follow makes segment s the previous turn of the request, which has reached its chunks.
func (p *Policy) follow(r *request, s *segment) {
	r.turn = min(s.turn+1, 250)
	r.before = s.end + 1
	r.pause = p.now - s.birth
	r.tip = s.tip
	r.reached, r.under = false, false
	if r.seg != none && p.partOf(r.seg) != partShared {
		p.segs.At(r.seg).turn = r.turn
	}
}

// touch moves a found chunk to the request's own segment.
func (p *Policy) touch(e *abi.Event) {
	i := e.Slot
	s := p.slots.At(i)
	g := s.seg
	old := p.segs.At(g)
	if r := p.request(e.Request); r.open && r.id == e.Request && (r.seg == g || r.found == g) {
		return // the chunk was touched already, or the request has inserted it
	}
	r := p.chain(e, p.parentOf(i))
	was := basePart(old.base)
	wasPrivate := was != partShared && was != partOrphan
	if r.from != g {
		p.settle(r)
		p.cellDel(g)
		p.model.reused(old)
		if wasPrivate {
			p.follow(r, old)
		}
		p.unname(g)
		old.state |= touching
		old.request = e.Request
		r.from = g
		r.meet(p.now, old)
	}
	p.detach(i)
	if old.n == 0 {
		r.expect(old)
		p.release(g)
	}
	part := uint8(partFound)
	if s.shared {
		part = partShared
	}
	p.place(r, i, part)
	if wasPrivate && e.Key == r.tip {
		r.reached = true
	}
}

// settle ends the touching of a segment. Its remaining chunks count as left over.
func (p *Policy) settle(r *request) {
	g := r.from
	if g == none {
		return
	}
	r.from = none
	s := p.segs.At(g)
	s.state &^= touching
	if basePart(s.base) != partShared {
		s.feature = [features]uint8{}
		p.move(g, baseLeft, levelOne)
	}
	p.refresh(g)
}

// insert adds a new chunk to the request's segment.
func (p *Policy) insert(e *abi.Event) {
	i := e.Slot
	if p.slots.At(i).seg != none {
		p.remove(i)
	}
	parent := e.Parent
	if parent >= p.slots.Len() || p.slots.At(parent).seg == none || parent == i {
		parent = none
	}
	r := p.chain(e, parent)
	p.settle(r)
	s := p.room(i)
	*s = slot{key: e.Key, seg: none, parent: none, size: e.Size, tenant: e.Tenant, depth: e.Depth, gen: s.gen}
	if parent != none {
		p.branch(parent)
		if p.slots.At(parent).shared {
			r.turn, r.before, r.tip, r.reached, r.under = 1, 0, 0, false, true
		}
	}
	if !r.begun {
		r.begun, r.branch = true, e.Depth
	}
	p.remember(r, e)
	part := uint8(partNew)
	switch {
	case parent == none && e.Depth > 0, parent != none && p.partOf(p.slots.At(parent).seg) == partOrphan:
		part = partOrphan
	case int64(e.Depth) <= r.shares:
		part, s.shared = partShared, true
	case int64(e.Depth) <= r.again:
		part = partFound
	}
	p.place(r, i, part)
	if parent != none {
		p.link(i, parent)
	}
	if e.Key == r.tip {
		r.reached = true
	}
}

// remember looks for the ghost of an evicted segment that begins with the inserted chunk.
func (p *Policy) remember(r *request, e *abi.Event) {
	g := p.ghostFind(e.Key)
	if g == none {
		return
	}
	s := p.segs.At(g)
	p.model.reused(s)
	part := basePart(s.base)
	r.meet(p.now, s)
	if part != partShared {
		p.follow(r, s)
	}
	r.expect(s)
	p.release(g)
}

// expect records the depth of a segment that the request has followed down to its cut. Chunks inserted down to that
// depth were resident before.
func (r *request) expect(s *segment) {
	if s.short == far {
		return
	}
	switch basePart(s.base) {
	case partNew, partFound:
		r.again = int64(s.end) - int64(s.short)
	case partShared:
		r.shares = int64(s.end)
	}
}

// place adds slot i to the segment for a part of request r.
func (p *Policy) place(r *request, i uint32, part uint8) {
	g := r.seg
	if g == none || p.partOf(g) != part || part == partShared && r.fresh {
		made, ok := p.newSegment(part, r)
		switch {
		case ok:
			if g != none && p.partOf(g) == partFound {
				r.found = g
			}
			g = made
			p.segs.At(g).turn = r.turn
			r.seg = g
			if part == partShared {
				p.classifyShared(r, g)
			}
		case g == none:
			g = p.anySegment()
		}
	}
	r.fresh = false
	s := p.segs.At(g)
	if r.up {
		p.attachTop(i, g)
	} else {
		p.attach(i, g)
	}
	s.end, s.short = max(s.end, p.slots.At(i).depth), 0
	r.last = i
	if (part == partNew || part == partFound) && s.n == 1 {
		p.classify(r, g, false)
	}
	p.refresh(g)
	p.latest = g
}

func (p *pool) partOf(g uint32) uint8 { return uint8(basePart(p.segs.At(g).base)) }

// anySegment returns a segment to join if there is no room for a new one: the latest, or the next one with chunks.
func (p *Policy) anySegment() uint32 {
	g := p.latest
	for g == none || p.segs.At(g).state&(live|ghost) != live {
		if g++; g >= p.used { // none is the greatest number
			g = 0
		}
	}
	return g
}

// classifyShared sets the features of a segment of shared chunks: the time since its previous use, in powers of four
// from two seconds, and the number of uses.
func (p *Policy) classifyShared(r *request, g uint32) {
	s := p.segs.At(g)
	s.turn = r.uses
	s.feature = [features]uint8{uint8(min(7, bits.Len32(r.idle>>10)/2)), turnValue(r.uses)}
	s.level = p.model.level(s)
}

// turnValue returns the feature value of a turn number. It is exact up to six, and then in powers of two.
func turnValue(turn uint8) uint8 {
	if turn > 6 {
		return uint8(6 + bits.Len8(turn-6))
	}
	return turn
}

// classify sets the features of a segment from its request. They are provisional until the request ends.
func (p *Policy) classify(r *request, g uint32, end bool) {
	s := p.segs.At(g)
	depth := s.end
	kind, grown := uint32(0), depth+1 // a first turn, with its length
	pause := uint8(0)
	if r.under {
		kind, grown = 3, depth+1-min(depth, r.branch) // a first turn under a shared prefix
	}
	if r.turn > 1 {
		kind, grown = 1, 0 // the request extends the previous turn
		if depth+1 > r.before {
			grown = depth + 1 - r.before
		}
		if !r.reached && (end || depth > r.before) {
			kind, grown = 2, depth-min(depth, r.branch) // the request branches off
		}
		pause = uint8(1 + min(pauses-2, bits.Len32(r.pause>>14))) // below 17 s, then doubling
	}
	s.feature = [features]uint8{uint8(8*kind + min(7, uint32(bits.Len32(grown)))), turnValue(r.turn)}
	s.turn = r.turn
	base := partBase(uint8(basePart(s.base)), pause)
	listed := s.is(candidate)
	p.cellDel(g)
	s.base = base
	s.level = p.model.level(s)
	if listed {
		p.cellAdd(g)
	}
}

// endChain finalises the request's segments, because their features are known now. The last chunk gets a segment of its
// own.
func (p *Policy) endChain(r *request) {
	if !r.open {
		return
	}
	p.settle(r)
	r.open = false
	if p.latest == r.seg {
		p.latest = none
	}
	g := r.seg
	if g == none {
		return
	}
	s := p.segs.At(g)
	end := s.end
	if f := r.found; f != none {
		own := p.segs.At(f).end
		p.segs.At(f).end = end
		p.segs.At(f).short = uint8(min(end-min(own, end), far))
		p.classify(r, f, true)
		p.segs.At(f).tip = p.slots.At(p.segs.At(f).tail).key
		p.refresh(f)
	}
	if part := p.partOf(g); part != partNew && part != partFound || s.n == 0 {
		return
	}
	p.classify(r, g, true)
	tail := s.tail
	s.tip = p.slots.At(tail).key
	if p.slots.At(tail).depth != end {
		return // the last chunk was removed already
	}
	if s.n > 1 {
		s.tip = p.slots.At(p.slots.At(tail).prev).key
		s.short = 1
		if f := r.found; f != none {
			p.segs.At(f).tip = s.tip
		}
	}
	p.splitLast(r, g)
}

// splitLast gives the last chunk of a chain a segment of its own.
func (p *Policy) splitLast(r *request, g uint32) {
	s := p.segs.At(g)
	tail := s.tail
	l := g
	if s.n > 1 {
		made, ok := p.newSegment(partLast, r)
		if !ok {
			return
		}
		l = made
		p.cellDel(g)
		p.detach(tail)
		p.attach(tail, l)
		n := p.segs.At(l)
		n.end, n.turn, n.feature = s.end, s.turn, s.feature
	}
	n := p.segs.At(l)
	n.tip = p.slots.At(tail).key
	p.cellDel(l)
	n.base = partBase(partLast, 0)
	n.level = p.model.level(n)
	p.refresh(l)
	p.refresh(g)
}
