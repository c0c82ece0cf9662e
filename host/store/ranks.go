package store

import "math/bits"

// rankSets gives numbers to the sets of ranks whose pieces entries have, so that an entry names its set in a byte: nearly
// all have the same few.
type rankSets struct {
	sets   [unnumbered]uint64
	uses   [unnumbered]uint32
	number map[uint64]uint8
}

// unnumbered is what an entry says whose set found no number free.
const unnumbered = 1<<8 - 1

func (n *rankSets) init() { n.number = map[uint64]uint8{0: 0} }

// use counts one user of a set.
func (n *rankSets) use(set uint64) uint8 {
	if set == 0 {
		return 0
	}
	id, ok := n.number[set]
	for free := uint8(1); !ok && free < unnumbered; free++ {
		if n.uses[free] == 0 {
			id, ok = free, true
			n.number[set], n.sets[id] = id, set
		}
	}
	if !ok {
		return unnumbered
	}
	n.uses[id]++
	return id
}

// drop takes one user back.
func (n *rankSets) drop(id uint8) {
	if id == 0 || id == unnumbered {
		return
	}
	if n.uses[id]--; n.uses[id] == 0 {
		delete(n.number, n.sets[id])
	}
}

// pieces is the set of ranks whose pieces are there.
func (x *index) pieces(slot uint32) uint64 { return x.piecesOf(slot, x.at(slot)) }

func (x *index) piecesOf(slot uint32, e *entry) uint64 {
	if e.ranks == unnumbered {
		return x.wide[slot]
	}
	return x.ranks.sets[e.ranks]
}

func (x *index) setPieces(slot uint32, set uint64) {
	e := x.at(slot)
	x.ranks.drop(e.ranks)
	if e.ranks == unnumbered {
		delete(x.wide, slot)
	}
	if e.ranks = x.ranks.use(set); e.ranks == unnumbered {
		x.wide[slot] = set
	}
}

// reserved is the set of ranks that an entry's size has bytes for.
func (x *index) reserved(slot uint32) uint64 { return x.pieces(slot) | x.owed[slot] }

// owe notes ranks that bytes were reserved for.
func (x *index) owe(slot uint32, ranks uint64) {
	x.setOwed(slot, x.owed[slot]|ranks)
}

func (x *index) setOwed(slot uint32, ranks uint64) {
	was := x.owed[slot]
	if was == ranks {
		return
	}
	class := x.ownerOf(slot).class
	if x.lacking[class] += int64(bits.OnesCount64(ranks) - bits.OnesCount64(was)); x.lacking[class] == 0 {
		delete(x.lacking, class)
	}
	if x.owed[slot] = ranks; ranks == 0 {
		delete(x.owed, slot)
	}
}

// arrive enters a piece that bytes were reserved for.
func (x *index) arrive(slot, rank uint32) {
	x.setPieces(slot, x.pieces(slot)|1<<rank)
	x.arrived(slot, rank)
}

// arrived ends what an entry is owed of a rank.
func (x *index) arrived(slot, rank uint32) {
	x.setOwed(slot, x.owed[slot]&^(1<<rank))
}
