package sandbox

import (
	"unsafe"

	"github.com/tetratelabs/wazero/experimental"
	"golang.org/x/sys/unix"
)

// mapped backs a guest's memory by a reservation of its largest size, of which the part in use is accessible. Compared
// with a Go slice, an instance starts ten times faster (nothing is zeroed twice), growing copies nothing, a large limit
// costs only address space, and closing releases the pages at once.
type mapped struct {
	all  []byte
	maps []byte // the whole mapping; all starts at its first boundary of a huge page
	used uint64
	huge bool
}

// A memory of this size or more, such as a Go guest's, uses huge pages. A guest reads its tables at random: with small
// pages half of the time is spent on page walks.
const (
	hugeFrom = 1 << 20
	hugePage = 2 << 20
)

// slowToFree is the size of memory in bytes from which a release takes milliseconds.
const slowToFree = 64 << 20

// reserve reserves a memory. most is its limit in bytes.
func reserve(most uint64) experimental.LinearMemory {
	if most == 0 {
		return &sliced{}
	}
	b, err := unix.Mmap(-1, 0, int(most)+hugePage, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_NORESERVE)
	if err != nil {
		return &sliced{most: most} // the address space of this process is limited: grow by copying
	}
	skip := -uintptr(unsafe.Pointer(&b[0])) % hugePage
	return &mapped{all: b[skip:][:most:most], maps: b}
}

func (m *mapped) Reallocate(size uint64) []byte {
	if size > uint64(len(m.all)) {
		return nil
	}
	if size > m.used {
		if err := unix.Mprotect(m.all[m.used:size], unix.PROT_READ|unix.PROT_WRITE); err != nil {
			return nil
		}
	}
	if size >= hugeFrom && !m.huge {
		m.huge = true
		_ = unix.Madvise(m.all, unix.MADV_HUGEPAGE) // an error only means slower memory
	}
	if size > m.used {
		populate(m.all[m.used:size])
		m.used = size
	}
	return m.all[:size:size]
}

// populateStep is the bytes that one system call populates, in less than a millisecond. Other users of the process's
// memory map, such as the growth of Go's heap, wait for one step at most.
const populateStep = 4 * hugePage

// madvise is a variable so that tests can watch it.
var madvise = unix.Madvise

// populate faults in the pages of a memory that may have huge pages. Otherwise the guest's first access to such a page
// would take a tenth of a millisecond for the fuel of one load: in 4 GiB, 0.2 s for 40,000 units. Memory that grows in
// smaller steps pays for its pages with the fuel of growing.
func populate(memory []byte) {
	if len(memory) < hugeFrom {
		return
	}
	for len(memory) > 0 {
		n := min(len(memory), populateStep)
		if madvise(memory[:n], unix.MADV_POPULATE_WRITE) != nil {
			return // not supported before Linux 5.14: pages are then allocated at first use
		}
		memory = memory[n:]
	}
}

func (m *mapped) Free() {
	if m.all != nil {
		_ = unix.Munmap(m.maps) // cannot fail, since it unmaps our own mapping
		m.all, m.maps = nil, nil
	}
}

type sliced struct {
	b    []byte
	most uint64
}

func (s *sliced) Reallocate(size uint64) []byte {
	if size > s.most {
		return nil
	}
	if size > uint64(cap(s.b)) {
		b := make([]byte, size, min(s.most, size+size/4))
		copy(b, s.b)
		s.b = b
	}
	s.b = s.b[:size]
	return s.b
}

func (s *sliced) Free() { s.b = nil }
