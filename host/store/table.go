package store

import "math/bits"

// shard is a part of the table from fingerprints to slots: open addressing in Robin Hood order. A cell is three 16-bit
// words that lie in one cache line: the distance from home plus one (0: empty) with eight bits of the fingerprint, and
// the slot. So a probe reads the slab only where the entry is very likely the wanted one, and taking an entry out hashes
// nothing.
//
// The root's table is cut in shards by the fingerprint's high bits so that growing is a short pause, and a shard grows by
// a quarter, so that its cells are 72 to 90 % full: 6.7 to 8.3 bytes per entry.
type shard struct {
	cells []uint16
	n     int
	// Chains of entries by their parent's fingerprint: see family.go.
	kin   int
	heads []uint32
}

const (
	shardBits   = 10
	shardCount  = 1 << shardBits
	cellWords   = 3
	minCells    = 2
	maxDistance = 255
	far         = 0xff // the distance in a cell's first word
)

// home is the preferred one among n places of a fingerprint: its bits below the shard's, scaled.
func home(print uint64, n int) int {
	hi, _ := bits.Mul64(print<<shardBits, uint64(n))
	return int(hi)
}

// first is the first word of a cell at home.
func first(print uint64) uint16 { return uint16(print)<<8 + 1 }

func (t *shard) size() int { return len(t.cells) / cellWords }

func (t *shard) slot(i int) uint32 {
	c := t.cells[i : i+3 : i+3]
	return uint32(c[1]) | uint32(c[2])<<16
}

func (t *shard) set(i int, word uint16, slot uint32) {
	c := t.cells[i : i+3 : i+3]
	c[0], c[1], c[2] = word, uint16(slot), uint16(slot>>16)
}

// step is the index of the next cell.
func (t *shard) step(i int) int {
	if i += cellWords; i < len(t.cells) {
		return i
	}
	return 0
}

// seek goes on from cell i, where the wanted entry would have this word, to the first cell that has the word that the
// entry would have there; -1 when there is none.
func (t *shard) seek(i int, word uint16) (int, uint16) {
	for ; ; word++ {
		at := t.cells[i]
		if at&far < word&far {
			return -1, 0
		}
		if at == word {
			return i, word
		}
		if i += cellWords; i >= len(t.cells) {
			i = 0
		}
	}
}

// start is where a fingerprint's search begins; -1 when the shard is empty.
func (t *shard) start(print uint64) (int, uint16) {
	if t.n == 0 {
		return -1, 0
	}
	return t.seek(home(print, t.size())*cellWords, first(print))
}

// again goes on after a cell that was not it.
func (t *shard) again(i int, word uint16) (int, uint16) { return t.seek(t.step(i), word+1) }

// full says that the table should grow before the next insert.
func (t *shard) full() bool { return 10*(t.n+1) > 9*t.size() }

// insert adds a slot that is not there. It is false when an entry would stand too far from home: grow first.
func (t *shard) insert(print uint64, slot uint32) bool {
	i, word := home(print, t.size())*cellWords, first(print)
	if !t.fits(i, word) {
		return false
	}
	for ; ; word++ {
		at := t.cells[i]
		if at == 0 {
			t.set(i, word, slot)
			t.n++
			return true
		}
		if at&far < word&far {
			old := t.slot(i)
			t.set(i, word, slot)
			word, slot = at, old
		}
		i = t.step(i)
	}
}

// fits goes the way of an insert without changing anything and says whether no distance overflows.
func (t *shard) fits(i int, word uint16) bool {
	for d := word & far; d < maxDistance; d++ {
		at := t.cells[i] & far
		if at == 0 {
			return true
		}
		if at < d {
			d = at
		}
		i = t.step(i)
	}
	return false
}

// removeAt empties a cell and moves those after it one closer to home.
func (t *shard) removeAt(i int) {
	for {
		j := t.step(i)
		if t.cells[j]&far <= 1 {
			break
		}
		t.set(i, t.cells[j]-1, t.slot(j))
		i = j
	}
	t.cells[i] = 0
	t.n--
}

// grow makes room for a quarter more. print hashes a slot's entry again. It is false when that would not help: the
// entries are few, and crowd all the same.
func (t *shard) grow(print func(slot uint32) uint64) bool {
	for n := t.size() + t.size()/4 + minCells; n <= 4*(t.n+1)+2*minCells; n += n/4 + 1 {
		next := shard{cells: make([]uint16, n*cellWords)}
		if next.fill(t, print) {
			t.cells = next.cells
			return true
		}
	}
	return false
}

func (t *shard) fill(from *shard, print func(slot uint32) uint64) bool {
	for i := 0; i < len(from.cells); i += cellWords {
		if from.cells[i] != 0 && !t.insert(print(from.slot(i)), from.slot(i)) {
			return false
		}
	}
	return true
}
