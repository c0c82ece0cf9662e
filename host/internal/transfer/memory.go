package transfer

import (
	"fmt"
	"slices"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/kv"
)

// Memory is one session's registered pages of one group. A page is addressed by plane and block id, never by pointer.
// Implementations are safe for concurrent use; callers make sure that concurrent jobs use different blocks.
type Memory interface {
	// Geometry returns the shape of a chunk in this memory.
	Geometry() kv.Geometry
	// Blocks returns the number of blocks: ids are below it.
	Blocks() uint32
	// Gather copies extents from pages to dst and writes their checksums to the range's table.
	Gather(r ExtentRange, dst []byte) error
	// Scatter copies extents from src to pages. No byte of an extent reaches a page before the extent is verified
	// against the range's table. Blocks with the id abi.None are verified and not copied.
	Scatter(r ExtentRange, src []byte) error
}

// ExtentRange is extents [Lo, Hi) of one chunk on their way between its pages and a buffer.
type ExtentRange struct {
	Plan   *kv.Plan
	Lo, Hi int
	Blocks []uint32 // the client's block id for each block of the chunk
	Base   int64    // payload offset of the buffer's first byte
	Table  []uint64 // checksums by extent of the plan
}

func end(e kv.Extent) int64 { return e.Off + int64(e.Len) }

// extents lists the range's extents.
func (r *ExtentRange) extents() []kv.Extent { return r.Plan.Extents()[r.Lo:r.Hi] }

func (r *ExtentRange) sum(buf []byte) { kv.SumExtents(r.Plan, r.Lo, r.Hi, buf, r.Base, r.Table) }

func (r *ExtentRange) verify(buf []byte) error {
	return kv.VerifyExtents(r.Plan, r.Lo, r.Hi, buf, r.Base, r.Table)
}

// HostRegion is the memory of one plane: page i is at Data[Offset+i*Stride:].
type HostRegion struct {
	Data   []byte
	Offset int64
	Stride int64
	Blocks uint32
}

// HostMemory is [Memory] in this process' address space: a client's shared memory, mapped here.
type HostMemory struct {
	geometry kv.Geometry
	regions  []HostRegion // by plane
	data     [][]byte     // their memory
	blocks   uint32
}

// NewHostMemory checks that regions, one per plane of g in its order, hold their pages.
func NewHostMemory(g kv.Geometry, regions []HostRegion) (*HostMemory, error) {
	shapes := make([]regionShape, len(regions))
	for i, r := range regions {
		shapes[i] = regionShape{size: int64(len(r.Data)), offset: r.Offset, stride: r.Stride, blocks: r.Blocks}
	}
	blocks, err := checkRegions(&g, shapes)
	if err != nil {
		return nil, err
	}
	m := &HostMemory{geometry: g, regions: regions, blocks: blocks}
	for _, r := range regions {
		m.data = append(m.data, r.Data)
	}
	return m, nil
}

// regionShape is the part of a region that is checked, in host and device memory alike.
type regionShape struct {
	size, offset, stride int64
	blocks               uint32
}

// checkRegions checks that regions hold the pages of g's planes, and returns the number of blocks.
func checkRegions(g *kv.Geometry, regions []regionShape) (uint32, error) {
	if err := g.Validate(); err != nil {
		return 0, err
	}
	if len(regions) != len(g.Planes) {
		return 0, fmt.Errorf("%w: %d regions for %d planes", ErrRegion, len(regions), len(g.Planes))
	}
	blocks := regions[0].blocks
	for i, r := range regions {
		page := int64(g.Planes[i].PageBytes)
		switch {
		case r.blocks == 0:
			return 0, fmt.Errorf("%w: plane %d has no blocks", ErrRegion, i)
		case r.blocks != blocks:
			return 0, fmt.Errorf("%w: plane %d has %d blocks, plane 0 has %d", ErrRegion, i, r.blocks, blocks)
		case r.offset < 0 || r.stride < page:
			return 0, fmt.Errorf("%w: plane %d: offset %d, stride %d, page %d bytes", ErrRegion, i, r.offset, r.stride,
				page)
		case r.size < page || r.offset > r.size-page || (r.size-page-r.offset)/r.stride < int64(r.blocks-1):
			return 0, fmt.Errorf("%w: plane %d: %d blocks of stride %d from offset %d do not fit %d bytes",
				ErrRegion, i, r.blocks, r.stride, r.offset, r.size)
		}
	}
	return blocks, nil
}

// Geometry returns the shape of a chunk in this memory.
func (m *HostMemory) Geometry() kv.Geometry { return m.geometry }

// Blocks returns the number of blocks.
func (m *HostMemory) Blocks() uint32 { return m.blocks }

func (m *HostMemory) page(s *kv.Span, id uint32) []byte {
	r := &m.regions[s.Plane]
	at := r.Offset + int64(id)*r.Stride + int64(s.PageOff)
	return r.Data[at : at+int64(s.Len)]
}

// Gather works extent by extent, so that the checksum reads bytes that the copy has just brought into the cache.
func (m *HostMemory) Gather(r ExtentRange, dst []byte) error {
	return Guard(m.data, func() error { return m.gather(&r, dst) })
}

func (m *HostMemory) gather(r *ExtentRange, dst []byte) error {
	for x := r.Lo; x < r.Hi; x++ {
		for c := r.Plan.Spans(x, x+1); c.Next(); {
			copy(dst[c.Span.Off-r.Base:], m.page(&c.Span, r.Blocks[c.Span.Block]))
		}
		kv.SumExtents(r.Plan, x, x+1, dst, r.Base, r.Table)
	}
	return nil
}

// Scatter works extent by extent: it verifies, which brings the extent into the cache, and then copies.
func (m *HostMemory) Scatter(r ExtentRange, src []byte) error {
	return Guard(m.data, func() error { return m.scatter(&r, src) })
}

func (m *HostMemory) scatter(r *ExtentRange, src []byte) error {
	for x := r.Lo; x < r.Hi; x++ {
		if err := kv.VerifyExtents(r.Plan, x, x+1, src, r.Base, r.Table); err != nil {
			return err
		}
		for c := r.Plan.Spans(x, x+1); c.Next(); {
			if id := r.Blocks[c.Span.Block]; id != abi.None {
				copy(m.page(&c.Span, id), src[c.Span.Off-r.Base:])
			}
		}
	}
	return nil
}

// checkBlocks refuses ids that are out of range, or absent where holes are not allowed, before any byte is touched.
func checkBlocks(m Memory, ids []uint32, holes bool) error {
	g := m.Geometry()
	if len(ids) != int(g.Blocks) {
		return fmt.Errorf("%w: %d ids for a chunk of %d blocks", ErrBlocks, len(ids), g.Blocks)
	}
	for i, id := range ids {
		if id == abi.None && holes {
			continue
		}
		if id >= m.Blocks() {
			return fmt.Errorf("%w: block %d of the chunk has id %d, the memory has %d blocks", ErrBlocks, i, id,
				m.Blocks())
		}
	}
	return nil
}

// sameShape reports whether a plan's geometry is the memory's: the copy loops index by its planes and blocks.
func sameShape(a, b kv.Geometry) bool {
	return a.Blocks == b.Blocks && slices.Equal(a.Planes, b.Planes)
}
