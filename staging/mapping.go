package staging

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Pages is the kind of pages of a memory.
type Pages string

// Kinds of pages.
const (
	HugePages        Pages = "huge pages"
	TransparentPages Pages = "transparent huge pages, where the kernel finds them"
	SmallPages       Pages = "small pages"
)

const hugePage = 2 << 20

// Mapping is memory outside the Go heap, suitable for O_DIRECT and for page-locking. It is not safe for concurrent use.
type Mapping struct {
	mapped []byte // the whole mapping, for munmap
	mem    []byte // the used part of mapped
	pages  Pages
}

// Map maps memory, aligned to [Align], in huge pages if possible. Its pages are allocated when they are touched, except
// [HugePages], which are reserved at once. Children of the process do not inherit it.
func Map(bytes int) (*Mapping, error) {
	mapped, mem, pages, err := mapMemory(unix.Mmap, bytes, transparentHere())
	if err != nil {
		return nil, fmt.Errorf("staging: map %d bytes: %w", bytes, err)
	}
	_ = unix.Madvise(mapped, unix.MADV_DONTFORK)
	return &Mapping{mapped: mapped, mem: mem, pages: pages}, nil
}

// Bytes is the memory.
func (m *Mapping) Bytes() []byte { return m.mem }

// Pages is the kind of pages of the memory.
func (m *Mapping) Pages() Pages { return m.pages }

// Unmap gives the memory back. Nothing may use it any more.
func (m *Mapping) Unmap() error {
	err := unix.Munmap(m.mapped)
	m.mapped, m.mem = nil, nil
	return err
}

// Populate allocates all pages without changing their contents. It fails with EINVAL on a kernel before 5.14.
func (m *Mapping) Populate() error {
	// One call per huge page, since a call holds the lock of the process's mappings and can take milliseconds to make a
	// huge page.
	for part := range slices.Chunk(m.mem, hugePage) {
		if err := retry(func() error { return unix.Madvise(part, unix.MADV_POPULATE_WRITE) }); err != nil {
			return err
		}
	}
	return nil
}

// mapper is the signature of mmap.
type mapper func(fd int, offset int64, length, prot, flags int) ([]byte, error)

// mapMemory maps memory. It uses reserved huge pages if there are enough, because page-locking and translating them
// takes fewer steps, and transparent huge pages otherwise. mapped is for munmap, and mem is its used part.
func mapMemory(mmap mapper, total int, transparent string) (mapped, mem []byte, pages Pages, err error) {
	const prot, flags = unix.PROT_READ | unix.PROT_WRITE, unix.MAP_ANON | unix.MAP_PRIVATE
	room := 0
	if total >= hugePage {
		whole := (total + hugePage - 1) &^ (hugePage - 1)
		mapped, err = mmap(-1, 0, whole, prot, flags|unix.MAP_HUGETLB|unix.MAP_HUGE_2MB) // reserves all of it, or fails
		if err == nil {
			return mapped, mapped[:total:total], HugePages, nil
		}
		room = hugePage - Align // so that mem can start at a huge page
	}
	if mapped, err = mmap(-1, 0, total+room, prot, flags|unix.MAP_NORESERVE); err != nil {
		return nil, nil, "", err
	}
	skip := 0
	if room > 0 {
		skip = int(-address(mapped) & (hugePage - 1))
	}
	mem = mapped[skip : skip+total : skip+total]
	pages = SmallPages
	if unix.Madvise(mem, unix.MADV_HUGEPAGE) == nil && room > 0 && Transparent(transparent) {
		pages = TransparentPages
	}
	return mapped, mem, pages, nil
}

// transparentFile is the file with the setting of transparent huge pages.
const transparentFile = "/sys/kernel/mm/transparent_hugepage/enabled"

// Transparent parses transparent_hugepage/enabled. It reports whether memory that requests huge pages gets them.
func Transparent(enabled string) bool {
	return strings.Contains(enabled, "[always]") || strings.Contains(enabled, "[madvise]")
}

func transparentHere() string {
	text, _ := os.ReadFile(transparentFile) // missing in a kernel without them
	return string(text)
}

// Near binds memory that was not touched yet to NUMA nodes: to one, or interleaved over several. If a node has too
// little memory, other nodes are used.
func (m *Mapping) Near(nodes ...int) error {
	const preferred, interleave = 1, 3
	var mask [16]uint64
	for _, n := range nodes {
		if n < 0 || n >= 64*len(mask) {
			return fmt.Errorf("staging: NUMA node %d: want 0 to %d", n, 64*len(mask)-1)
		}
		mask[n/64] |= 1 << (n % 64)
	}
	mode := uintptr(preferred)
	switch len(nodes) {
	case 0:
		return nil
	case 1:
	default:
		mode = interleave
	}
	err := retry(func() error {
		_, _, errno := unix.Syscall6(unix.SYS_MBIND, uintptr(unsafe.Pointer(unsafe.SliceData(m.mapped))),
			uintptr(len(m.mapped)), mode, uintptr(unsafe.Pointer(&mask)), uintptr(64*len(mask)), 0)
		if errno != 0 {
			return errno
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("staging: mbind to NUMA nodes %v: %w", nodes, err)
	}
	return nil
}
