package store

import (
	"math/bits"
	"slices"
)

// table finds slots by fingerprint in four bytes a cell: the slot, and in the bits that slots leave free some of the
// fingerprint's, so that a search reads the slab only where the entry is likely the wanted one (with 2^24 slots one
// search in eight reads an entry in vain, with 2^21 one in sixty-four). Cells stand in buckets of one cache line. A
// fingerprint has two of them, and where both are full, an entry of one moves to its other one; so buckets can be 94 %
// full, and taking an entry out is clearing its cell.
//
// The table is cut in shards by the fingerprint's high bits so that growing is a short pause, and a shard grows by a
// sixteenth, and what the memory for so much has room for: 4.3 to 4.8 bytes per entry.
type table struct {
	shards [shardCount]shard
	shift  uint                     // bits of a slot in a cell
	print  func(slot uint32) uint64 // of an entry that is in the table
}

type shard struct {
	cells []uint32
	n     int
}

const (
	shardBits   = 12
	shardCount  = 1 << shardBits
	bucketCells = 16
	emptyCell   = 1<<32 - 1 // no slot is all ones
)

type bucket = [bucketCells]uint32

func (t *table) init(slots uint32, print func(slot uint32) uint64) {
	t.shift, t.print = uint(bits.Len32(slots)), print
}

func (t *table) shard(print uint64) *shard { return &t.shards[print>>(64-shardBits)] }

// slotOf is the slot in a cell.
func (t *table) slotOf(cell uint32) uint32 { return cell & (1<<(t.shift&31) - 1) }

func (t *table) cell(print uint64, slot uint32) uint32 { return uint32(print)<<(t.shift&31) | slot }

func (s *shard) buckets() int { return len(s.cells) / bucketCells }

func (s *shard) bucket(i int) *bucket { return (*bucket)(s.cells[i*bucketCells:]) }

// home and other are the two buckets of a fingerprint in a shard of n: its bits below the shard's, scaled, and all of
// it, mixed.
func home(print uint64, n int) int {
	hi, _ := bits.Mul64(print<<shardBits, uint64(n))
	return int(hi)
}

func other(print uint64, n int) int {
	hi, _ := bits.Mul64(print*0x9e3779b97f4a7c15, uint64(n))
	return int(hi)
}

// first and second are the buckets of a fingerprint, or nil.
func (t *table) first(print uint64) *bucket {
	s := t.shard(print)
	n := s.buckets()
	if n == 0 {
		return nil
	}
	return s.bucket(home(print, n))
}

func (t *table) second(print uint64) *bucket {
	s := t.shard(print)
	return s.bucket(other(print, s.buckets()))
}

// having is the set of a bucket's cells that may be of a fingerprint.
func (t *table) having(b *bucket, print uint64) uint32 { return havingOne(b, print, t.shift) }

// seek calls visit for the slots that may have this fingerprint, until it has found the wanted one.
func (t *table) seek(print uint64, visit func(slot uint32) (found bool)) bool {
	s := t.shard(print)
	n := s.buckets()
	if n == 0 {
		return false
	}
	first, second := home(print, n), other(print, n)
	for at := first; ; at = second {
		b := s.bucket(at)
		for set := t.having(b, print); set != 0; set &= set - 1 {
			if c := b[bits.TrailingZeros32(set)]; c != emptyCell && visit(t.slotOf(c)) {
				return true
			}
		}
		if at == second {
			return false
		}
	}
}

// remove takes a slot out and says whether it was there.
func (t *table) remove(print uint64, slot uint32) bool {
	s := t.shard(print)
	n, want := s.buckets(), t.cell(print, slot)
	if n == 0 {
		return false
	}
	for _, at := range [...]int{home(print, n), other(print, n)} {
		b := s.bucket(at)
		for i := range b {
			if b[i] == want {
				b[i] = emptyCell
				s.n--
				return true
			}
		}
	}
	return false
}

// insert adds a slot that is not there. It is false when more fingerprints are nearly equal than a table holds apart.
func (t *table) insert(print uint64, slot uint32) bool {
	s := t.shard(print)
	for full := 16*(s.n+1) > 15*len(s.cells); full || !t.place(s, print, slot); full = false {
		if !t.grow(s) {
			return false
		}
	}
	return true
}

// place puts a slot into one of its buckets, if need be by moving an entry to its other one.
func (t *table) place(s *shard, print uint64, slot uint32) bool {
	n, c := s.buckets(), t.cell(print, slot)
	at := [...]int{home(print, n), other(print, n)}
	for _, i := range at {
		if s.put(i, c) {
			return true
		}
	}
	for _, i := range at {
		b := s.bucket(i)
		for j, there := range b {
			p := t.print(t.slotOf(there))
			to := home(p, n) + other(p, n) - i
			if to != i && s.put(to, there) {
				b[j] = c
				return true
			}
		}
	}
	return false
}

// put puts a cell into a bucket that has an empty one.
func (s *shard) put(i int, c uint32) bool {
	b := s.bucket(i)
	for j := range b {
		if b[j] == emptyCell {
			b[j] = c
			s.n++
			return true
		}
	}
	return false
}

// grow makes room for a sixteenth more, or for as much as it takes. It is false when that would not help: the entries are
// few, and crowd all the same.
func (t *table) grow(s *shard) bool {
	for n := s.buckets()*17/16 + 1; bucketCells*n <= 4*(s.n+bucketCells); n += n/16 + 1 {
		next := shard{cells: cellsFor(n)}
		if t.fill(&next, s) {
			*s = next
			return true
		}
	}
	return false
}

// cellsFor makes n buckets, or as many more as the memory for so many has room for.
func cellsFor(n int) []uint32 {
	cells := slices.Grow([]uint32(nil), n*bucketCells)
	cells = cells[:cap(cells)/bucketCells*bucketCells]
	for i := range cells {
		cells[i] = emptyCell
	}
	return cells
}

func (t *table) fill(to, from *shard) bool {
	for _, c := range from.cells {
		if c != emptyCell && !t.place(to, t.print(t.slotOf(c)), t.slotOf(c)) {
			return false
		}
	}
	return true
}

// reserve makes room for so many entries in all shards together, as far as they spread evenly.
func (t *table) reserve(entries int) {
	each := entries/shardCount*17/15/bucketCells + 1
	for i := range t.shards {
		if s := &t.shards[i]; s.n == 0 && s.buckets() < each {
			s.cells = cellsFor(each)
		}
	}
}

func (t *table) memory() (n int64) {
	for i := range t.shards {
		n += int64(cap(t.shards[i].cells))*4 + 32
	}
	return n
}
