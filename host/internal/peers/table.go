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

// A table holds 64 lists of fingerprints at most, and takes at most so much memory, and a shard's while one grows.
const (
	lists     = 64
	mostTable = 288 << 20
	cellBytes = 16
	shards    = 256
	fewCells  = 256 // that Go's heap has
)

// Table says which peers have an entry: a bit of a word for each, by the entry's fingerprint. It is exact, so a promise is wrong only
// while a change is on its way. An entry takes 20 to 24 bytes, however many peers have it, and to ask for all peers is one look. A
// Bloom or cuckoo filter takes 2 bytes an entry and peer, and a look for each peer.
type Table struct {
	shards [shards]shard
	count  [lists]atomic.Int64
	taken  atomic.Uint64 // lists in use
	cells  atomic.Int64
	full   atomic.Uint64 // fingerprints that there was no memory for
	most   int64         // bytes, 0: mostTable

	growing sync.Mutex // one shard at a time has its cells twice
}

// shard is the fingerprints with the same first byte of their place, by open addressing. Who reads takes no lock: a cell keeps its fingerprint, and one
// that is replaced by growth is out of date at worst.
type shard struct {
	cells atomic.Pointer[[]cell]

	mu    sync.Mutex // of who writes
	used  int        // cells with a fingerprint
	dead  int        // of them, of entries that no peer has any more
	spare []cell     // of the last growth but one, for the next: empty, and without memory
}

type cell struct {
	print atomic.Uint64 // 0: empty
	has   atomic.Uint64
}

// Where a fingerprint is looked for differs from run to run: a peer that chose its fingerprints would have them in a row otherwise, which
// each search for one of them passes.
var scatter = [2]uint64{rand.Uint64() | 1, rand.Uint64() | 1}

// placed is a fingerprint's shard, in the first byte, and its place there. No two have the same.
func placed(print uint64) uint64 {
	print *= scatter[0]
	return (print ^ print>>32) * scatter[1]
}

// open takes a list.
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

// drop empties a list and gives it back. It must not count any more.
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

// at is the lists that have a fingerprint.
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

// find is the cell of a fingerprint, or the one that it would get.
func find(cells []cell, print, place uint64) (c *cell, found bool) {
	if len(cells) == 0 {
		return nil, false
	}
	hi, _ := bits.Mul64(place<<8, uint64(len(cells)))
	at := int(hi)
	for range cells { // cells that are out of date may have no end of it
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

// greedy says that a list gets no more cells: the last quarter of the memory is for those that have less than an equal part of
// all, or half where there is one.
func (t *Table) greedy(list int) bool {
	most := cmp.Or(t.most, mostTable)
	return t.cells.Load()*cellBytes > most/4*3 &&
		t.count[list].Load()*int64(max(2, bits.OnesCount64(t.taken.Load()))) > most/cellBytes*4/5
}

// grow makes room by a fifth, and leaves out what no peer has.
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

// empty is so many cells without a fingerprint, nil if there is no memory for them. Many are not on Go's heap, where those that are out
// of date would take as much again until they are collected.
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

// clear gives the memory of cells back and keeps their addresses: who reads them finds them empty.
func (s *shard) clear(cells []cell) {
	cells = cells[:cap(cells)]
	s.spare = nil
	if n := len(cells) * cellBytes; n > fewCells*cellBytes &&
		unix.Madvise(unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(cells))), n), unix.MADV_DONTNEED) == nil {
		s.spare = cells
	}
}

// learn enters the fingerprints of a message.
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
