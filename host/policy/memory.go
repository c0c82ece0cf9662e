package policy

import (
	"unsafe"

	"github.com/tetratelabs/wazero/experimental"
	"golang.org/x/sys/unix"
)

// mapped backs a guest's memory with one reservation of its largest size, of which the part in use is made accessible.
// Against a Go slice, an instance starts ten times faster (nothing is zeroed twice), growing copies nothing, a large
// limit costs address space only, and closing gives the pages back at once.
type mapped struct {
	all  []byte
	maps []byte // with what is around all so that it begins where a huge page can
	used uint64
	huge bool
}

// From this size on, which that of a Go guest is, a memory asks for huge pages. A guest's tables are visited at random, and
// its code after other work: with small pages half of that time goes into finding the page.
const (
	hugeFrom = 1 << 20
	hugePage = 2 << 20
)

// slowToFree is how much memory it takes milliseconds to give back.
const slowToFree = 64 << 20

var allocator = experimental.MemoryAllocatorFunc(func(_, most uint64) experimental.LinearMemory {
	if most == 0 {
		return &sliced{}
	}
	b, err := unix.Mmap(-1, 0, int(most)+hugePage, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_NORESERVE)
	if err != nil {
		return &sliced{most: most} // address space is limited here: grow by copying
	}
	skip := -uintptr(unsafe.Pointer(&b[0])) % hugePage
	return &mapped{all: b[skip:][:most:most], maps: b}
})

func (m *mapped) Reallocate(size uint64) []byte {
	if size > uint64(len(m.all)) {
		return nil
	}
	if size > m.used {
		if err := unix.Mprotect(m.all[m.used:size], unix.PROT_READ|unix.PROT_WRITE); err != nil {
			return nil
		}
		m.used = size
	}
	if size >= hugeFrom && !m.huge {
		m.huge = true
		_ = unix.Madvise(m.all, unix.MADV_HUGEPAGE) // a wish
	}
	return m.all[:size:size]
}

// populate has the system give the pages now of a memory that could have huge ones: the first use of such a page takes it a
// tenth of a millisecond, for which a guest would pay what a word in a cache costs.
func populate(memory []byte) {
	if len(memory) >= hugeFrom {
		_ = unix.Madvise(memory, unix.MADV_POPULATE_WRITE) // Linux 5.14
	}
}

func (m *mapped) Free() {
	if m.all != nil {
		_ = unix.Munmap(m.maps) // the slice is our own, so that it cannot be refused
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
