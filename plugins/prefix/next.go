package prefix

import "github.com/kvhost/kvhost/abi"

// The functions below handle the most common events with few branches: a chunk that follows the request's last one in
// the same segments. They have the same effect as touch and insert, or do nothing and return false. Short functions
// matter twice in a module, because the meter charges the length of a function at each jump.

// touchNext moves the next chunk from the segment that is being touched to the request's own segment.
func (p *Policy) touchNext(e *abi.Event) bool {
	r, s := p.request(e.Request), p.slots.At(e.Slot)
	from := r.from
	if r.id != e.Request || r.seg == none || s.parent != r.last || s.parent == none || s.seg != from || s.prev != none || s.kids == 0 || s.next == none {
		return false
	}
	seg, old, q := p.segs.At(r.seg), p.segs.At(from), p.slots.At(s.parent)
	if !r.open || seg.tail != r.last || q.gen != s.parentGen || e.Key == r.tip || seg.is(candidate) {
		return false
	}
	if part := p.partOf(r.seg); s.shared != (part == partShared) || part < partFound {
		return false
	}
	old.head = s.next
	p.slots.At(s.next).prev = none
	old.n--
	q.next = e.Slot
	s.seg, s.prev, s.next = r.seg, seg.tail, none
	seg.tail, seg.end = e.Slot, s.depth
	seg.n++
	r.last, r.up, r.above = e.Slot, false, 0
	return true
}

// insertNext appends a new chunk to the segment of new chunks.
func (p *Policy) insertNext(e *abi.Event) bool {
	r, s := p.request(e.Request), p.slots.At(e.Slot)
	if r.id != e.Request || e.Parent != r.last || e.Parent == none || s.seg != none || r.seg == none || r.from != none {
		return false
	}
	seg, q := p.segs.At(r.seg), p.slots.At(e.Parent)
	if !r.open || !r.begun || seg.tail != e.Parent || !seg.is(candidate) || p.partOf(r.seg) != partNew {
		return false
	}
	if q.fan != 0 || e.Key == r.tip || int64(e.Depth) <= r.again || int64(e.Depth) <= r.shares || *p.hash.Of(ghostHash(e.Key)) != none || !p.slots.Has(e.Slot) {
		return false
	}
	q.fan, q.kids, q.next = 1, 1, e.Slot
	*s = slot{key: e.Key, seg: r.seg, prev: e.Parent, next: none, parent: e.Parent, parentGen: q.gen, gen: s.gen, size: e.Size, tenant: e.Tenant, depth: e.Depth}
	seg.tail, seg.end = e.Slot, e.Depth
	seg.n++
	r.last, r.up, r.above = e.Slot, false, 0
	p.latest = r.seg
	if seg.n&(seg.n-1) == 0 && seg.n >= 4 {
		p.classify(r, r.seg, false)
	}
	return true
}
