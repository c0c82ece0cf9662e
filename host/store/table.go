package store

import "math/bits"

// shard is a part of the table from fingerprints to slots: open addressing, Robin Hood order. A cell is a slot and a
// word of two bytes: the distance from home plus one (0: empty), and eight bits of the fingerprint; so a probe reads
// the slab only where the entry is very likely the wanted one, and taking an entry out hashes nothing.
//
// The root's table is cut in shards by the fingerprint's high byte so that growing is a short pause, and grows by a
// quarter so that cells are 72 to 90 % full: 6.7 to 8.3 bytes per entry.
type shard struct {
	cells []uint32
	meta  []uint16
	n     int
	// Chains of entries by their parent's fingerprint: see family.go.
	heads []uint32
	kin   int
}

const (
	shardBits   = 8
	shardCount  = 1 << shardBits
	minCells    = 8
	maxDistance = 255
)

// home is the preferred cell of a fingerprint among n: its bits below the shard's, scaled.
func home(print uint64, n int) int {
	hi, _ := bits.Mul64(print<<shardBits, uint64(n))
	return int(hi)
}

func tagOf(print uint64) uint16 { return uint16(print) << 8 }

// find gives the cell whose slot satisfies match, or -1.
func (t *shard) find(print uint64, match func(slot uint32) bool) int {
	if t.n == 0 {
		return -1
	}
	i := home(print, len(t.cells))
	for want := tagOf(print) + 1; ; want++ {
		m := t.meta[i]
		if m&0xff < want&0xff {
			return -1
		}
		if m == want && match(t.cells[i]) {
			return i
		}
		if i++; i == len(t.cells) {
			i = 0
		}
	}
}

// full says that the table should grow before the next insert.
func (t *shard) full() bool { return 10*(t.n+1) > 9*len(t.cells) }

// insert adds a slot that is not there. It is false when an entry would stand too far from home: grow first.
func (t *shard) insert(print uint64, slot uint32) bool {
	i := home(print, len(t.cells))
	m := tagOf(print) + 1
	if !t.fits(i, m) {
		return false
	}
	for ; ; m++ {
		switch at := t.meta[i]; {
		case at == 0:
			t.meta[i], t.cells[i] = m, slot
			t.n++
			return true
		case at&0xff < m&0xff:
			t.meta[i], m = m, at
			t.cells[i], slot = slot, t.cells[i]
		}
		if i++; i == len(t.cells) {
			i = 0
		}
	}
}

// fits walks the way of an insert without changing anything and says whether no distance overflows.
func (t *shard) fits(i int, m uint16) bool {
	for d := m & 0xff; ; d++ {
		if d == maxDistance {
			return false
		}
		at := t.meta[i] & 0xff
		if at == 0 {
			return true
		}
		if at < d {
			d = at
		}
		if i++; i == len(t.meta) {
			i = 0
		}
	}
}

// removeAt empties a cell and moves those after it one closer to home.
func (t *shard) removeAt(i int) {
	for {
		j := i + 1
		if j == len(t.cells) {
			j = 0
		}
		m := t.meta[j]
		if m&0xff <= 1 {
			break
		}
		t.meta[i], t.cells[i] = m-1, t.cells[j]
		i = j
	}
	t.meta[i] = 0
	t.n--
}

// grow makes room for a quarter more. print hashes a slot's entry again.
func (t *shard) grow(print func(slot uint32) uint64) {
	for n := max(minCells, len(t.cells)+len(t.cells)/4); ; n += n/4 + 1 {
		next := shard{cells: make([]uint32, n), meta: make([]uint16, n)}
		if next.fill(t, print) {
			t.cells, t.meta = next.cells, next.meta
			return
		}
	}
}

func (t *shard) fill(from *shard, print func(slot uint32) uint64) bool {
	for i, m := range from.meta {
		if m != 0 && !t.insert(print(from.cells[i]), from.cells[i]) {
			return false
		}
	}
	return true
}
