package index

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// A large index is asked for at random places: with pages of 4 KiB the processor then waits for the page table as often
// as for the entry. So what a large index allocates lies in huge pages where the kernel has them. What a small one
// allocates does not: it would take up to 2 MiB more than it needs.
const (
	hugePage   = 2 << 20
	hugeBlocks = 64     // blocks from this one on: 262,144 entries stand before it
	hugeCells  = 1 << 8 // a shard's cells from so many on: there are as many in 4,096 shards
)

// hugePages asks for huge pages behind memory of the heap that was allocated and perhaps not used yet, and behind what
// shares the first and the last of them: the heap grows by more than a huge page. Without them the index is only slower.
func hugePages(at unsafe.Pointer, bytes uintptr) {
	from, to := uintptr(at)&^(hugePage-1), (uintptr(at)+bytes+hugePage-1)&^(hugePage-1)
	_, _, _ = unix.Syscall(unix.SYS_MADVISE, from, to-from, unix.MADV_HUGEPAGE)
}
