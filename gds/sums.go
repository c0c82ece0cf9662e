package gds

import (
	"fmt"
	"unsafe"

	"github.com/kvhost/kvhost/gds/kernels"
)

// Extent is a run of a buffer in device memory that has a checksum of its own. The layout is the kernel's.
type Extent struct {
	Offset uint64 // in the buffer
	Len    uint32
	_      uint32
}

// MaxExtent is the longest extent that can be summed.
const MaxExtent = kernels.SumsExtent

// Sum writes the xxh3-64 of each extent of the buffer at address to sums, and returns when that is done. Both slices are
// in registered memory: the GPU reads and writes them itself.
func (t *Thread) Sum(address uint64, extents []Extent, sums []uint64) error {
	if len(extents) == 0 {
		return nil
	}
	if len(sums) < len(extents) {
		return fmt.Errorf("%w: %d extents, room for %d sums", ErrConfig, len(extents), len(sums))
	}
	g := t.gpu
	if g.sums.function == 0 {
		return fmt.Errorf("%w: the checksum kernel", ErrSymbol)
	}
	from, ok := g.driver.pinnedAt(bytesOf(extents))
	if !ok {
		return ErrUnpinned
	}
	to, ok := g.driver.pinnedAt(bytesOf(sums[:len(extents)]))
	if !ok {
		return ErrUnpinned
	}
	blocks := g.share(len(extents))
	defer g.copying.Add(-1)
	t.params = [7]uint64{address, from, uint64(len(extents)), to}
	if err := t.start(g.sums, blocks, kernels.SumsThreads); err != nil {
		return err
	}
	return t.wait()
}

// bytesOf is the memory of a slice.
func bytesOf[T any](s []T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(s))), len(s)*int(unsafe.Sizeof(*new(T))))
}
