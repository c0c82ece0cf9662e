package index

import (
	"math/bits"
	"slices"
)

// table finds slots by fingerprint. A cell has four bytes. They hold the slot, and in the remaining bits a tag of the
// fingerprint, so that a search reads the slab only if the entry is probably the right one. With 2^24 slots one search in eight
// reads a wrong entry, with 2^21 one in sixty-four. Cells are in buckets of one cache line. A fingerprint has two buckets. If
// both are full, an entry of one moves to its other bucket, so buckets can be 94 % full. Removing an entry clears one cell.
//
// The table is divided into shards by the high bits of the fingerprint, so that growing is a short pause. A shard grows by a
// sixteenth, rounded up to the allocator's size class. This takes 4.3 to 4.8 bytes per entry.
type table struct {
	shards [shardCount]shard
	shift  uint                     // bits of a slot in a cell
	fpOf   func(slot uint32) uint64 // returns the fingerprint of an entry in the table
}

type shard struct {
	cells []uint32
	n     int
}

const (
	shardBits   = 12
	shardCount  = 1 << shardBits
	bucketCells = 16
	emptyCell   = 1<<32 - 1 // not a slot: no slot has all bits set
)

type bucket = [bucketCells]uint32

func (t *table) init(slots uint32, fpOf func(slot uint32) uint64) {
	t.shift, t.fpOf = uint(bits.Len32(slots)), fpOf
}

func (t *table) shard(fp uint64) *shard { return &t.shards[fp>>(64-shardBits)] }

// slotOf returns the slot in a cell.
func (t *table) slotOf(cell uint32) uint32 { return cell & (1<<(t.shift&31) - 1) }

func (t *table) cell(fp uint64, slot uint32) uint32 { return uint32(fp)<<(t.shift&31) | slot }

func (s *shard) buckets() int { return len(s.cells) / bucketCells }

func (s *shard) bucket(i int) *bucket { return (*bucket)(s.cells[i*bucketCells:]) }

// firstBucket returns the first bucket of a fingerprint in a shard of n buckets. It scales the bits below those that select the
// shard. secondBucket mixes all bits.
func firstBucket(fp uint64, n int) int {
	hi, _ := bits.Mul64(fp<<shardBits, uint64(n))
	return int(hi)
}

func secondBucket(fp uint64, n int) int {
	hi, _ := bits.Mul64(fp*0x9e3779b97f4a7c15, uint64(n))
	return int(hi)
}

// first returns the first bucket of a fingerprint, or nil if its shard is empty.
func (t *table) first(fp uint64) *bucket {
	s := t.shard(fp)
	n := s.buckets()
	if n == 0 {
		return nil
	}
	return s.bucket(firstBucket(fp, n))
}

func (t *table) second(fp uint64) *bucket {
	s := t.shard(fp)
	return s.bucket(secondBucket(fp, s.buckets()))
}

// matches returns the cells of a bucket that may have a fingerprint, as bits.
func (t *table) matches(b *bucket, fp uint64) uint32 { return matchBucket(b, fp, t.shift) }

// search calls visit for each slot that may have this fingerprint, until visit returns true.
func (t *table) search(fp uint64, visit func(slot uint32) (found bool)) {
	s := t.shard(fp)
	n := s.buckets()
	if n == 0 {
		return
	}
	first, second := firstBucket(fp, n), secondBucket(fp, n)
	for at := first; ; at = second {
		b := s.bucket(at)
		for set := t.matches(b, fp); set != 0; set &= set - 1 {
			if c := b[bits.TrailingZeros32(set)]; c != emptyCell && visit(t.slotOf(c)) {
				return
			}
		}
		if at == second {
			return
		}
	}
}

// most returns an upper bound for the number of slots with a fingerprint, without reading any entry.
func (t *table) most(fp uint64) int {
	b := t.first(fp)
	if b == nil {
		return 0
	}
	return bits.OnesCount32(t.matches(b, fp)) + bits.OnesCount32(t.matches(t.second(fp), fp))
}

// remove removes a slot if it is in the table.
func (t *table) remove(fp uint64, slot uint32) {
	s := t.shard(fp)
	n, want := s.buckets(), t.cell(fp, slot)
	if n == 0 {
		return
	}
	for _, at := range [...]int{firstBucket(fp, n), secondBucket(fp, n)} {
		b := s.bucket(at)
		for i := range b {
			if b[i] == want {
				b[i] = emptyCell
				s.n--
				return
			}
		}
	}
}

// insert adds a slot that is not in the table. It returns false if both buckets are full of nearly equal fingerprints and
// growing does not help.
func (t *table) insert(fp uint64, slot uint32) bool {
	s := t.shard(fp)
	for full := 16*(s.n+1) > 15*len(s.cells); full || !t.place(s, fp, slot); full = false {
		if !t.grow(s) {
			return false
		}
	}
	return true
}

// place puts a slot into one of its buckets, if necessary by moving another entry to its other bucket.
func (t *table) place(s *shard, fp uint64, slot uint32) bool {
	n, c := s.buckets(), t.cell(fp, slot)
	at := [...]int{firstBucket(fp, n), secondBucket(fp, n)}
	for _, i := range at {
		if s.put(i, c) {
			return true
		}
	}
	for _, i := range at {
		b := s.bucket(i)
		for j, there := range b {
			p := t.fpOf(t.slotOf(there))
			to := firstBucket(p, n) + secondBucket(p, n) - i
			if to != i && s.put(to, there) {
				b[j] = c
				return true
			}
		}
	}
	return false
}

// put puts a cell into a bucket if the bucket has an empty cell.
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

// grow enlarges a shard by a sixteenth, or by more if its entries do not fit otherwise. It returns false if growing does not
// help, because a few entries all have the same buckets.
func (t *table) grow(s *shard) bool {
	for n := s.buckets()*17/16 + 1; bucketCells*n <= 4*(s.n+bucketCells); n += n/16 + 1 {
		next := shard{cells: newCells(n)}
		if t.rehash(&next, s) {
			*s = next
			return true
		}
	}
	return false
}

// newCells returns n empty buckets, and as many more as fit the allocator's size class.
func newCells(n int) []uint32 {
	cells := slices.Grow([]uint32(nil), n*bucketCells)
	cells = cells[:cap(cells)/bucketCells*bucketCells]
	for i := range cells {
		cells[i] = emptyCell
	}
	return cells
}

// rehash places all slots of one shard in another. It returns false if one does not fit.
func (t *table) rehash(to, from *shard) bool {
	for _, c := range from.cells {
		if c != emptyCell && !t.place(to, t.fpOf(t.slotOf(c)), t.slotOf(c)) {
			return false
		}
	}
	return true
}

// reserve makes room for the given number of entries, spread evenly over the shards.
func (t *table) reserve(entries int) {
	each := entries/shardCount*17/15/bucketCells + 1
	for i := range t.shards {
		if s := &t.shards[i]; s.n == 0 && s.buckets() < each {
			s.cells = newCells(each)
		}
	}
}

func (t *table) memory() (n int64) {
	for i := range t.shards {
		n += int64(cap(t.shards[i].cells))*4 + 32
	}
	return n
}
