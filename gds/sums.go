package gds

import (
	"fmt"
	"unsafe"

	"github.com/kvhost/kvhost/gds/internal/kernels"
)

// Extent is a run of a device buffer that has its own checksum. The layout is the kernel's.
type Extent struct {
	Offset uint64 // offset in the buffer
	Len    uint32
	Codec  uint32 // codec of a [Coder]; otherwise 0
}

// MaxExtent is the longest extent that can be summed.
const MaxExtent = kernels.SumsExtent

// Sum writes the xxh3-64 of each extent of the buffer at address to sums, and waits for it. Both slices must be in
// registered memory: the GPU reads and writes them.
func (t *Thread) Sum(address uint64, extents []Extent, sums []uint64) error {
	if len(extents) == 0 {
		return nil
	}
	blocks := t.gpu.acquireBlocks(len(extents))
	defer t.gpu.releaseBlocks()
	if err := t.beginSum(address, extents, sums, nil, 0, blocks); err != nil {
		return err
	}
	return t.wait()
}

// beginSum is Sum without waiting. If a sum differs from the expected one, a batch of the epoch that is launched
// after this moves nothing. blocks counts blocks of the copy kernel; as many threads are launched.
func (t *Thread) beginSum(address uint64, extents []Extent, sums, expected []uint64, epoch uint32, blocks int) error {
	g := t.gpu
	if len(sums) < len(extents) || expected != nil && len(expected) < len(extents) {
		return fmt.Errorf("%w: %d extents, room for %d sums", ErrConfig, len(extents), len(sums))
	}
	if g.kernels.sums.function == 0 {
		return fmt.Errorf("%w: the checksum kernel", ErrSymbol)
	}
	t.params = [len(t.params)]uint64{address, 0, uint64(len(extents)), 0, 0, t.halted, uint64(epoch)}
	for i, mem := range [...][]byte{1: bytesOf(extents), 3: bytesOf(sums[:len(extents)]), 4: bytesOf(expected)} {
		if len(mem) == 0 {
			continue
		}
		var ok bool
		if t.params[i], ok = g.driver.pinnedAt(mem); !ok {
			return ErrUnpinned
		}
	}
	return t.start(g.kernels.sums, min(blocks*kernels.PagesThreads/kernels.SumsThreads, len(extents)),
		kernels.SumsThreads)
}

// bytesOf returns the memory of a slice.
func bytesOf[T any](s []T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(s))), len(s)*int(unsafe.Sizeof(*new(T))))
}
