package index

import "math/bits"

// pieceSets numbers the sets of ranks with pieces that are there, so that an entry names its set in one byte: nearly all
// entries have one of the same few sets.
type pieceSets struct {
	sets   [unnumbered]uint64
	uses   [unnumbered]uint32
	number map[uint64]uint8
}

// unnumbered is the number of a set for which no number was free.
const unnumbered = 1<<8 - 1

// acquire counts one user of a set and returns its number.
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

// release takes one user back.
func (p *pieceSets) release(id uint8) {
	if id == 0 || id == unnumbered {
		return
	}
	if p.uses[id]--; p.uses[id] == 0 {
		delete(p.number, p.sets[id])
	}
}

// Pieces is the set of ranks with a piece that is there, one bit each.
func (x *Index) Pieces(slot uint32) uint64 { return x.EntryPieces(slot, x.At(slot)) }

// EntryPieces is Pieces for a caller that has the entry.
func (x *Index) EntryPieces(slot uint32, e *Entry) uint64 {
	if e.pieces == unnumbered {
		return x.wide[slot]
	}
	return x.pieceSets.sets[e.pieces]
}

// SetPieces sets the ranks with a piece that is there.
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

// Reserved is the set of ranks that an entry's size has bytes for.
func (x *Index) Reserved(slot uint32) uint64 { return x.Pieces(slot) | x.missing[slot] }

// Missing is the set of ranks of missing pieces that bytes are reserved for.
func (x *Index) Missing(slot uint32) uint64 { return x.missing[slot] }

// MissingByClass is how many pieces are missing of the entries of each class. The map must not be changed.
func (x *Index) MissingByClass() map[uint16]int64 { return x.missingByClass }

// ReservePieces notes ranks that bytes were reserved for.
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

// PieceWritten enters a piece that bytes were reserved for.
func (x *Index) PieceWritten(slot, rank uint32) {
	x.SetPieces(slot, x.Pieces(slot)|1<<rank)
	x.UnreservePiece(slot, rank)
}

// UnreservePiece notes that no bytes are reserved for a missing piece any more.
func (x *Index) UnreservePiece(slot, rank uint32) {
	x.setMissing(slot, x.missing[slot]&^(1<<rank))
}
