package prefix

import (
	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
)

// Policy is the evictor. It follows the requests, and passes the touched chunks to the ranking. It implements
// [guest.Evictor].
type Policy struct {
	ranking
	begin  uint64 // time of the first event
	moved  uint32 // time at which segments were last moved to their buckets of age
	ended  uint32 // number of ended requests
	due    uint32 // number of ended requests at which the next fit begins
	fitted int    // completed steps of the latest fit

	latest uint32 // segment of the latest chunk
	hand   uint32 // slot at which the next search for a tenant's chunks begins
	open   [requests]request
	undo   []uint32
}

// A tick is 2^20 ns, about a millisecond. Segments are moved to their buckets of age every few ticks.
const (
	tickBits  = 20
	moveEvery = 64
)

// A fit begins when the number of seen requests has grown by an eighth, within limits.
const (
	fitFirst = 32
	fitLast  = 1024
)

// New returns a policy for the slots of a root.
func New(info guest.Info) (*Policy, error) {
	n := info.MaxSlots
	p := &Policy{
		latest: none,
		undo:   make([]uint32, 0, 2*(info.MaxVictims+looks)),
		due:    fitFirst,
	}
	p.pool.init(n)
	p.ranking.init()
	return p, nil
}

// Limits of the work in one call, regardless of its batch, because the work of a call is limited.
const (
	movesPerCall = 48 // segments moved to their buckets of age
	fitsPerCall  = 1  // steps of a fit
)

// Events applies a batch.
func (p *Policy) Events(batch []abi.Event) {
	p.moves = movesPerCall
	for k := range batch {
		e := &batch[k]
		p.tick(e.Time)
		if e.Op == abi.OpRequestEnd {
			p.endRequest(e.Request)
			continue
		}
		if e.Slot >= p.slots.Len() {
			continue
		}
		s := p.slots.At(e.Slot)
		if e.Op == abi.OpInsert {
			if !p.insertNext(e) {
				p.insert(e)
			}
			continue
		}
		if e.Op == abi.OpResident {
			p.resident(e)
			continue
		}
		if s.seg == none {
			continue
		}
		switch e.Op {
		case abi.OpTouch:
			if !p.touchNext(e) {
				p.touch(e)
			}
		case abi.OpRemove:
			p.remove(e.Slot)
		case abi.OpLink:
			p.relink(e)
		case abi.OpPin:
			if s.pins < 1<<16-1 {
				s.pins++
			}
			p.refresh(s.seg)
		case abi.OpUnpin:
			if s.pins > 0 {
				s.pins--
			}
			p.refresh(s.seg)
		}
	}
	if p.now-p.moved >= moveEvery && p.advance() {
		p.moved = p.now
	}
	for n := 0; n < fitsPerCall && p.fitted < fitSteps; n++ {
		if row := p.model.fit(p.fitted); row >= 0 {
			p.replay(row)
		}
		p.fitted++
	}
}

// tick advances the clock. It counts from the first event and never goes back.
func (p *Policy) tick(t uint64) {
	if p.begin == 0 {
		p.begin = t
	}
	if t < p.begin {
		return
	}
	now := uint32((t - p.begin) >> tickBits)
	if int32(now-p.now) > 0 {
		p.now = now
	}
}

// endRequest ends a request. It advances the clock by at least one tick, so that segments also age in a stream without
// times.
func (p *Policy) endRequest(id uint32) {
	if r := p.request(id); r.open && r.id == id {
		p.endChain(r)
	}
	p.now++
	if p.ended++; p.ended >= p.due {
		p.due = p.ended + min(fitLast, max(fitFirst, p.ended/8))
		p.fitted = 0
	}
}

// resident adds a chunk that was resident before this instance. Nothing is known of its request.
func (p *Policy) resident(e *abi.Event) {
	p.insert(e)
	g := p.slots.At(e.Slot).seg
	if p.partOf(g) != partOrphan {
		p.move(g, baseLeft, levelOne)
	}
}

// remove removes a chunk. If it is the last one of its segment, a ghost remains.
func (p *Policy) remove(i uint32) {
	s := p.slots.At(i)
	g := s.seg
	if r := p.request(p.segs.At(g).request); r.last == i {
		r.last = none
	}
	p.detach(i)
	p.unparent(i)
	s.gen++
	s.kids = 0
	if p.segs.At(g).n == 0 {
		p.toGhost(g, s.key)
	} else {
		p.refresh(g)
	}
}

// relink links a chunk to its parent, which is resident again.
func (p *Policy) relink(e *abi.Event) {
	i := e.Slot
	p.unparent(i)
	p.link(i, e.Parent)
	g := p.slots.At(i).seg
	if p.partOf(g) == partOrphan && p.segs.At(g).head == i && p.parentOf(i) != none {
		p.move(g, partBase(partNew, 0), levelOne)
	}
}
