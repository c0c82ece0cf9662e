package peers

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Limits of a table. The peak of its memory is mostTable and the size of one shard, because a shard exists twice during its
// growth.
const (
	lists     = 64
	mostTable = 288 << 20
	cellBytes = 16
	shards    = 256
	fewCells  = 256 // largest number of cells of a shard that is on Go's heap
)

// Table records which peers have which entry. It maps the fingerprint of an entry to a word with one bit for each peer. The
// table is exact, so a promise is wrong only while a change is on its way. An entry takes 20 to 24 bytes for any number of
// peers, and one probe answers for all of them. A Bloom or cuckoo filter would take 2 bytes for each entry and peer, and one
// probe for each peer.
type Table struct {
	shards [shards]shard
	count  [lists]atomic.Int64
	taken  atomic.Uint64 // bitmap of the lists in use
	cells  atomic.Int64
	full   atomic.Uint64 // fingerprints that found no room
	most   int64         // limit of the cells in bytes; 0 means mostTable

	growing sync.Mutex // held during the growth of a shard, so that only one exists twice at a time
}

// shard is a hash table with open addressing for the fingerprints with the same first byte of their hash. Reads take no lock: a
// cell never changes its fingerprint, and a reader of cells that growth has just replaced sees at worst an outdated state.
type shard struct {
	cells atomic.Pointer[[]cell]

	mu    sync.Mutex // serializes writes
	used  int        // cells with a fingerprint
	dead  int        // the part of used that no peer has any more
	spare []cell     // cells of the growth before the last, reused by the next growth; their physical memory has been released
}

type cell struct {
	print atomic.Uint64 // fingerprint; 0 if the cell is empty
	has   atomic.Uint64 // bitmap of the lists with this fingerprint
}

// scatter seeds the hash of fingerprints and differs from run to run. Otherwise a peer could choose fingerprints that collide,
// and each probe for one of them would walk past all others.
var scatter = [2]uint64{rand.Uint64() | 1, rand.Uint64() | 1}

// placed hashes a fingerprint. The first byte selects the shard, the rest the position in it. The function is a bijection, so
// two fingerprints never have the same hash.
func placed(print uint64) uint64 {
	print *= scatter[0]
	return (print ^ print>>32) * scatter[1]
}

// open allocates a list for a peer. It fails if all lists are in use.
func (t *Table) open() (list int, ok bool) {
	for {
		taken := t.taken.Load()
		if list = bits.TrailingZeros64(^taken); list == lists {
			return 0, false
		}
		if t.taken.CompareAndSwap(taken, taken|1<<list) {
			return list, true
		}
	}
}

// drop removes all fingerprints of a list and frees the list. The caller must have excluded the list from lookups before.
func (t *Table) drop(list int) {
	for i := range t.shards {
		s := &t.shards[i]
		s.mu.Lock()
		cells := s.all()
		for j := range cells {
			if cells[j].has.And(^(uint64(1) << list)) == 1<<list {
				s.dead++
			}
		}
		s.mu.Unlock()
	}
	t.count[list].Store(0)
	t.taken.And(^(uint64(1) << list))
}

// at returns the lists that have a fingerprint, as a bitmap.
func (t *Table) at(print uint64) uint64 {
	place := placed(print)
	if c, found := find(t.shards[place>>56].all(), print, place); found {
		return c.has.Load()
	}
	return 0
}

func (s *shard) all() []cell {
	if p := s.cells.Load(); p != nil {
		return *p
	}
	return nil
}

// find returns the cell of a fingerprint. If there is none, it returns the empty cell for it and false.
func find(cells []cell, print, place uint64) (c *cell, found bool) {
	if len(cells) == 0 {
		return nil, false
	}
	hi, _ := bits.Mul64(place<<8, uint64(len(cells)))
	at := int(hi)
	for range cells { // bounds the loop: cells that a growth has replaced may have no empty one left
		c = &cells[at]
		switch c.print.Load() {
		case print:
			return c, true
		case 0:
			return c, false
		}
		if at++; at == len(cells) {
			at = 0
		}
	}
	return c, false
}

func (t *Table) add(print uint64, list int) {
	if print == 0 {
		return
	}
	place := placed(print)
	s := &t.shards[place>>56]
	s.mu.Lock()
	defer s.mu.Unlock()
	c, found := find(s.all(), print, place)
	if !found {
		if grown := (s.used+1)*5 > len(s.all())*4; t.greedy(list) || grown && !t.grow(s) {
			t.full.Add(1)
			return
		} else if grown {
			c, _ = find(s.all(), print, place)
		}
		c.print.Store(print)
		s.used++
	}
	had := c.has.Or(1 << list)
	if had&(1<<list) == 0 {
		t.count[list].Add(1)
	}
	if found && had == 0 {
		s.dead--
	}
}

func (t *Table) remove(print uint64, list int) {
	place := placed(print)
	s := &t.shards[place>>56]
	s.mu.Lock()
	defer s.mu.Unlock()
	c, found := find(s.all(), print, place)
	if !found {
		return
	}
	had := c.has.And(^(uint64(1) << list))
	if had&(1<<list) != 0 {
		t.count[list].Add(-1)
	}
	if had == 1<<list {
		s.dead++
	}
}

// greedy reports whether a list may take no more cells. The last quarter of the memory is reserved for lists that have less
// than an equal part of it, or less than half if there is only one list.
func (t *Table) greedy(list int) bool {
	most := cmp.Or(t.most, mostTable)
	return t.cells.Load()*cellBytes > most/4*3 &&
		t.count[list].Load()*int64(max(2, bits.OnesCount64(t.taken.Load()))) > most/cellBytes*4/5
}

// grow moves a shard to a larger array of cells and drops the dead cells. The new array has room for half as many fingerprints
// again.
func (t *Table) grow(s *shard) bool {
	old, alive := s.all(), s.used-s.dead
	size := alive*3/2 + 16
	t.growing.Lock()
	defer t.growing.Unlock()
	more := int64(size - len(old))
	if more > 0 && (t.cells.Load()+more)*cellBytes > cmp.Or(t.most, mostTable) {
		return false
	}
	cells := s.empty(size)
	if cells == nil {
		return false
	}
	t.cells.Add(more)
	for i := range old {
		if has := old[i].has.Load(); has != 0 {
			print := old[i].print.Load()
			c, _ := find(cells, print, placed(print))
			c.print.Store(print)
			c.has.Store(has)
		}
	}
	s.cells.Store(&cells)
	s.used, s.dead = alive, 0
	s.clear(old)
	return true
}

// empty returns n empty cells, or nil if there is no memory. Large arrays are mapped outside Go's heap: on the heap, replaced
// arrays would take the same amount again until the next collection.
func (s *shard) empty(n int) []cell {
	if n <= fewCells {
		return make([]cell, n)
	}
	if cap(s.spare) < n {
		mem, err := unix.Mmap(-1, 0, n*cellBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
		if err != nil {
			return nil
		}
		s.spare = unsafe.Slice((*cell)(unsafe.Pointer(unsafe.SliceData(mem))), n)
	}
	return s.spare[:n]
}

// clear releases the physical memory of cells and keeps them mapped. A reader that still has them finds them empty.
func (s *shard) clear(cells []cell) {
	cells = cells[:cap(cells)]
	s.spare = nil
	if n := len(cells) * cellBytes; n > fewCells*cellBytes &&
		unix.Madvise(unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(cells))), n), unix.MADV_DONTNEED) == nil {
		s.spare = cells
	}
}

// learn applies the fingerprints of a message to a list.
func (t *Table) learn(list int, added, removed []byte) error {
	if len(added)%8 != 0 || len(removed)%8 != 0 {
		return fmt.Errorf("%w: fingerprints of %d and %d bytes", ErrMessage, len(added), len(removed))
	}
	for ; len(removed) > 0; removed = removed[8:] {
		t.remove(binary.LittleEndian.Uint64(removed), list)
	}
	for ; len(added) > 0; added = added[8:] {
		t.add(binary.LittleEndian.Uint64(added), list)
	}
	return nil
}
