package prefix

import "github.com/kvhost/kvhost/abi"

// Limits of one answer. Together with a full batch of events it stays within the limit of a call. A host that needs
// more victims asks again.
const (
	looks  = 96      // chunks that are named, or skipped because of another tenant
	sweep  = 1 << 11 // slots that are searched from the end of the last sweep if the cells do not have enough
	sweeps = 6       // passes of a sweep; all but the last consider leaves only
)

// Victims names the least valuable chunks, each before its parent.
func (p *Policy) Victims(ask abi.Ask, dst []uint32) int {
	dst = dst[:min(len(dst), int(ask.MaxVictims), looks)]
	n, tries := 0, 0
	var freed uint64
	// Named chunks are taken out of their segments as if they had been removed, and are put back at the end.
	for n < len(dst) && freed < ask.Bytes && n+tries < looks {
		c := p.worst()
		if c == none {
			break
		}
		g := p.cells[c].first
		i := p.segs.At(g).tail
		s := p.slots.At(i)
		if ask.Tenant != none && ask.Tenant != s.tenant {
			tries++
			p.hide(g)
			continue
		}
		dst[n] = i
		n++
		if freed += uint64(s.size) * abi.SizeUnit; freed < ask.Bytes {
			p.pretend(i, g)
		}
	}
	for pass, left := 0, sweep; pass < sweeps && left > 0 && n < len(dst) && freed < ask.Bytes; pass++ {
		slots := min(left, int(p.slots.Made()))
		n, freed = p.sweep(ask, slots, pass < sweeps-1, freed, dst, n)
		left -= slots
	}
	p.restore()
	return n
}

// pretend takes chunk i, mostly the deepest one, out of segment g until the end of the answer.
func (p *Policy) pretend(i, g uint32) {
	p.undo = append(p.undo, i, g)
	p.cellDel(g)
	p.detach(i)
	if q := p.parentOf(i); q != none {
		p.slots.At(q).kids--
		if p.slots.At(q).kids == 0 && p.slots.At(q).seg != none {
			p.refresh(p.slots.At(q).seg)
		}
	}
	p.refresh(g)
}

// hide removes segment g from the candidates until the end of the answer.
func (p *Policy) hide(g uint32) {
	p.undo = append(p.undo, none, g)
	p.cellDel(g)
}

// restore undoes all calls of pretend and hide, the last one first.
func (p *Policy) restore() {
	for k := len(p.undo) - 2; k >= 0; k -= 2 {
		i, g := p.undo[k], p.undo[k+1]
		p.cellDel(g)
		if i != none {
			p.reattach(i, g)
			if q := p.parentOf(i); q != none {
				p.slots.At(q).kids++
				if p.slots.At(q).kids == 1 && p.slots.At(q).seg != none {
					p.refresh(p.slots.At(q).seg)
				}
			}
		}
		p.refresh(g)
	}
	p.undo = p.undo[:0]
}

// sweep adds chunks to the n victims in the order of the slots, if they can be evicted. It finds chunks that the cells
// do not offer: those of a segment that is being touched, those of a tenant with few chunks, and, without leaf, those
// above a pinned one.
func (p *Policy) sweep(ask abi.Ask, slots int, leaf bool, freed uint64, dst []uint32, n int) (int, uint64) {
	for k := 0; k < slots && n < len(dst) && freed < ask.Bytes; k++ {
		if p.hand++; p.hand >= p.slots.Made() {
			p.hand = 0
		}
		s := p.slots.At(p.hand)
		if s.seg == none || s.pins > 0 || ask.Tenant != none && ask.Tenant != s.tenant || leaf && s.kids > 0 {
			continue
		}
		dst[n] = p.hand
		n++
		freed += uint64(s.size) * abi.SizeUnit
		p.pretend(p.hand, s.seg)
	}
	return n, freed
}
