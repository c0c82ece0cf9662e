package prefix

import "github.com/kvhost/kvhost/abi"

const none = abi.None

// slot is one resident chunk. Slots of a segment form a list from the shallowest chunk to the deepest.
type slot struct {
	key        uint64
	seg        uint32 // segment of the chunk; none if the slot has no chunk
	prev, next uint32
	parent     uint32 // valid while the parent's generation equals parentGen
	kids       uint32 // number of resident children
	size       uint32
	tenant     uint32
	depth      uint32
	pins       uint16
	gen        uint8 // changes when the slot is emptied
	parentGen  uint8
	fan        uint8 // number of children ever, saturating
	shared     bool  // the chunk, or one below it, has had manyKids children
	_          uint16
}

// manyKids is the number of children from which a chunk counts as a shared prefix. In a single conversation, chunks
// have two or three.
const manyKids = 16

// link makes parent the parent of slot i.
func (p *ranking) link(i, parent uint32) {
	if parent >= p.slots.Len() || p.slots.At(parent).seg == none || parent == i {
		return
	}
	s, q := p.slots.At(i), p.slots.At(parent)
	s.parent, s.parentGen = parent, q.gen
	if q.kids++; q.kids == 1 {
		p.refresh(q.seg)
	}
}

// branch records a new child of parent. If parent then has many, the chunks above it are marked as shared. Each slot is
// marked once.
func (p *ranking) branch(parent uint32) {
	q := p.slots.At(parent)
	if q.fan < 255 {
		q.fan++
	}
	if q.fan < manyKids {
		return
	}
	for a := parent; a != none && !p.slots.At(a).shared; a = p.parentOf(a) {
		p.slots.At(a).shared = true
	}
}

// parentOf returns the resident parent of slot i, or none.
func (p *pool) parentOf(i uint32) uint32 {
	s := p.slots.At(i)
	if s.parent == none || p.slots.At(s.parent).gen != s.parentGen {
		return none
	}
	return s.parent
}

// unparent removes slot i from the children of its parent.
func (p *ranking) unparent(i uint32) {
	q := p.parentOf(i)
	p.slots.At(i).parent = none
	if q == none || p.slots.At(q).kids == 0 {
		return
	}
	if p.slots.At(q).kids--; p.slots.At(q).kids == 0 {
		p.refresh(p.slots.At(q).seg)
	}
}

// attach appends slot i to segment g as its deepest chunk.
func (p *pool) attach(i, g uint32) {
	s, seg := p.slots.At(i), p.segs.At(g)
	s.seg, s.prev, s.next = g, seg.tail, none
	if seg.tail == none {
		seg.head = i
	} else {
		p.slots.At(seg.tail).next = i
	}
	seg.tail = i
	seg.n++
}

// attachTop puts slot i in front of segment g as its shallowest chunk.
func (p *pool) attachTop(i, g uint32) {
	s, seg := p.slots.At(i), p.segs.At(g)
	s.seg, s.prev, s.next = g, none, seg.head
	if seg.head == none {
		seg.tail = i
	} else {
		p.slots.At(seg.head).prev = i
	}
	seg.head = i
	seg.n++
}

// reattach undoes the latest detach of slot i from segment g.
func (p *pool) reattach(i, g uint32) {
	s, seg := p.slots.At(i), p.segs.At(g)
	s.seg = g
	if s.prev == none {
		seg.head = i
	} else {
		p.slots.At(s.prev).next = i
	}
	if s.next == none {
		seg.tail = i
	} else {
		p.slots.At(s.next).prev = i
	}
	seg.n++
}

// detach takes slot i out of its segment.
func (p *pool) detach(i uint32) {
	s := p.slots.At(i)
	seg := p.segs.At(s.seg)
	if s.prev == none {
		seg.head = s.next
	} else {
		p.slots.At(s.prev).next = s.next
	}
	if s.next == none {
		seg.tail = s.prev
	} else {
		p.slots.At(s.next).prev = s.prev
	}
	seg.n--
	s.seg = none
}
