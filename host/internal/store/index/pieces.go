package index

import "math/bits"

// pieceSets numbers sets of present pieces, given as bits by rank. An entry refers to its set by a number of one byte, because
// nearly all entries have one of a few sets.
type pieceSets struct {
	sets   [unnumbered]uint64
	uses   [unnumbered]uint32
	number map[uint64]uint8
}

// unnumbered stands for a set that has no number because all were in use.
const unnumbered = 1<<8 - 1

// acquire adds a user of a set and returns the number of the set.
func (p *pieceSets) acquire(set uint64) uint8 {
	if set == 0 {
		return 0
	}
	id, ok := p.number[set]
	for free := uint8(1); !ok && free < unnumbered; free++ {
		if p.uses[free] == 0 {
			id, ok = free, true
			p.number[set], p.sets[id] = id, set
		}
	}
	if !ok {
		return unnumbered
	}
	p.uses[id]++
	return id
}

// release removes a user of a set.
func (p *pieceSets) release(id uint8) {
	if id == 0 || id == unnumbered {
		return
	}
	if p.uses[id]--; p.uses[id] == 0 {
		delete(p.number, p.sets[id])
	}
}

// Pieces returns the ranks with a present piece, as bits.
func (x *Index) Pieces(slot uint32) uint64 { return x.EntryPieces(slot, x.At(slot)) }

// EntryPieces is Pieces for a caller that has the entry.
func (x *Index) EntryPieces(slot uint32, e *Entry) uint64 {
	if e.pieces == unnumbered {
		return x.wide[slot]
	}
	return x.pieceSets.sets[e.pieces]
}

// SetPieces sets the ranks with a present piece.
func (x *Index) SetPieces(slot uint32, set uint64) {
	e := x.At(slot)
	x.pieceSets.release(e.pieces)
	if e.pieces == unnumbered {
		delete(x.wide, slot)
	}
	if e.pieces = x.pieceSets.acquire(set); e.pieces == unnumbered {
		x.wide[slot] = set
	}
}

// Reserved returns the ranks that are included in the size of an entry.
func (x *Index) Reserved(slot uint32) uint64 { return x.Pieces(slot) | x.missing[slot] }

// Missing returns the ranks of missing pieces with reserved bytes.
func (x *Index) Missing(slot uint32) uint64 { return x.missing[slot] }

// MissingByClass returns the number of missing pieces by class. The caller must not change the map.
func (x *Index) MissingByClass() map[uint16]int64 { return x.missingByClass }

// ReservePieces records ranks with reserved bytes.
func (x *Index) ReservePieces(slot uint32, ranks uint64) {
	x.setMissing(slot, x.missing[slot]|ranks)
}

func (x *Index) setMissing(slot uint32, ranks uint64) {
	was := x.missing[slot]
	if was == ranks {
		return
	}
	class := x.Owner(slot).Class
	if x.missingByClass[class] += int64(bits.OnesCount64(ranks) - bits.OnesCount64(was)); x.missingByClass[class] == 0 {
		delete(x.missingByClass, class)
	}
	if x.missing[slot] = ranks; ranks == 0 {
		delete(x.missing, slot)
	}
}

// PieceWritten marks a piece with reserved bytes as present.
func (x *Index) PieceWritten(slot, rank uint32) {
	x.SetPieces(slot, x.Pieces(slot)|1<<rank)
	x.UnreservePiece(slot, rank)
}

// UnreservePiece records that a missing piece no longer has reserved bytes.
func (x *Index) UnreservePiece(slot, rank uint32) {
	x.setMissing(slot, x.missing[slot]&^(1<<rank))
}
