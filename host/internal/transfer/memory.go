package transfer

import (
	"fmt"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/kv"
)

// Memory is one session's registered pages of one group. A page is addressed by plane and block id, never by pointer.
// Implementations are safe for concurrent use; callers make sure that concurrent jobs use different blocks.
type Memory interface {
	// Geometry returns the shape of a unit's chunk in this memory.
	Geometry() kv.Geometry
	// Blocks returns the number of blocks: ids are below it.
	Blocks() uint32
	// ChunkBlocks returns the number of blocks of a chunk. Each holds an equal number of the chunk's pages.
	ChunkBlocks() int
	// Gather copies extents from pages to dst and writes their checksums to the range's table.
	Gather(r ExtentRange, dst []byte) error
	// Scatter copies extents from src to pages. No byte of an extent reaches a page before the extent is verified
	// against the range's table. Blocks with the id abi.None are verified and not copied.
	Scatter(r ExtentRange, src []byte) error
}

// ExtentRange is extents [Lo, Hi) of one chunk, to be copied between its pages and a buffer.
type ExtentRange struct {
	Plan   *kv.Plan
	Lo, Hi int
	Unit   int      // unit of the memory
	Blocks []uint32 // the client's block ids, in the chunk's order
	Base   int64    // payload offset of the buffer's first byte
	Table  []uint64 // checksums, by extent of the plan
}

func end(e kv.Extent) int64 { return e.Off + int64(e.Len) }

// extents lists the range's extents.
func (r *ExtentRange) extents() []kv.Extent { return r.Plan.Extents()[r.Lo:r.Hi] }

func (r *ExtentRange) sum(buf []byte) { kv.SumExtents(r.Plan, r.Lo, r.Hi, buf, r.Base, r.Table) }

func (r *ExtentRange) verify(buf []byte) error {
	return kv.VerifyExtents(r.Plan, r.Lo, r.Hi, buf, r.Base, r.Table)
}

// Grid is the place of one plane's pages in a memory: page i of block b is at Offset+b*Stride+i*PageStride.
type Grid struct {
	Offset     int64
	Stride     int64
	Blocks     uint32
	Pages      uint32 // pages of a block; 0 means 1
	PageStride int64  // distance of a block's pages in bytes; unused if a block has one
}

// check returns the field of a grid that does not fit a memory of size bytes or does not go with the memory's first grid, and
// the reason. Any input is allowed.
func (g *Grid) check(first *Grid, page, size int64) (field, reason string) {
	more := int64(max(1, g.Pages)) - 1
	if more > 0 && (g.PageStride < page || g.PageStride > (size-page)/more) {
		return "page_stride", fmt.Sprintf("%d, %d pages of %d bytes in a memory of %d", g.PageStride, g.Pages, page, size)
	}
	block := page + more*g.PageStride // bytes from the start of a block's first page to the end of its last
	switch {
	case g.Blocks == 0 || g.Blocks == abi.None:
		return "blocks", fmt.Sprint(g.Blocks)
	case g.Stride < block || g.Stride > size:
		return "stride", fmt.Sprintf("%d, a block's pages take %d bytes, and the memory has %d", g.Stride, block, size)
	case g.Offset < 0 || g.Offset > size:
		return "offset", fmt.Sprintf("%d, the memory has %d bytes", g.Offset, size)
	case g.Offset > size-block || (size-block-g.Offset)/g.Stride < int64(g.Blocks-1):
		return "blocks", fmt.Sprintf("%d of stride %d from offset %d do not lie in a memory of %d bytes", g.Blocks, g.Stride, g.Offset, size)
	case g.Blocks != first.Blocks:
		return "blocks", fmt.Sprintf("%d, plane 0 of unit 0 has %d", g.Blocks, first.Blocks)
	case max(1, g.Pages) != max(1, first.Pages):
		return "pages", fmt.Sprintf("%d, plane 0 of unit 0 has %d", g.Pages, first.Pages)
	}
	return "", ""
}

// shape is the part of a memory that is the same on hosts and devices.
type shape struct {
	geometry kv.Geometry
	grids    []Grid // by unit, then plane
	blocks   uint32
	pages    uint32 // pages of a block
}

// newShape checks that the grids hold their pages; grid i lies in a memory of size(i) bytes. There is one grid per
// plane of g, in its order, for each unit.
func newShape(g kv.Geometry, grids []Grid, size func(i int) int64) (shape, error) {
	if err := g.Validate(); err != nil {
		return shape{}, err
	}
	planes := len(g.Planes)
	if len(grids) == 0 || len(grids)%planes != 0 {
		return shape{}, fmt.Errorf("%w: %d regions for %d planes", ErrRegion, len(grids), planes)
	}
	s := shape{geometry: g, grids: grids, blocks: grids[0].Blocks, pages: max(1, grids[0].Pages)}
	if g.Blocks%s.pages != 0 {
		return shape{}, fmt.Errorf("%w: blocks of %d pages do not divide a chunk of %d", ErrRegion, s.pages, g.Blocks)
	}
	for i := range grids {
		r := &grids[i]
		if field, reason := r.check(&grids[0], int64(g.Planes[i%planes].PageBytes), size(i)); field != "" {
			return shape{}, &RegionError{Region: i, Field: field, Reason: reason}
		}
	}
	return s, nil
}

// Geometry returns the shape of a unit's chunk in this memory.
func (s *shape) Geometry() kv.Geometry { return s.geometry }

// Blocks returns the number of blocks.
func (s *shape) Blocks() uint32 { return s.blocks }

// ChunkBlocks returns how many blocks a chunk has.
func (s *shape) ChunkBlocks() int { return int(s.geometry.Blocks / s.pages) }

// spans returns the spans of extents [lo, hi) of a range. Whole pages of a block are one span, wherever they lie.
func (s *shape) spans(r *ExtentRange, lo, hi int) kv.Cursor { return r.Plan.Spans(lo, hi, s.pages) }

// find returns the region of a span and the offset of its first byte in it. wanted is false if the span's block is not to be
// copied.
func (s *shape) find(r *ExtentRange, span *kv.Span) (region int, at int64, wanted bool) {
	block, page, in := span.Block, uint32(0), span.PageOff
	if s.pages > 1 {
		bytes := s.geometry.Planes[span.Plane].PageBytes
		block, page, in = block/s.pages, block%s.pages+in/bytes, in%bytes
	}
	id := r.Blocks[block]
	if id == abi.None {
		return 0, 0, false
	}
	region = r.Unit*len(s.geometry.Planes) + int(span.Plane)
	g := &s.grids[region]
	return region, g.Offset + int64(id)*g.Stride + int64(page)*g.PageStride + int64(in), true
}

// rows returns the bytes of a page and the distance of a block's pages, if those of a region are not adjacent, else 0.
func (s *shape) rows(region int) (page uint32, stride int64) {
	page, stride = s.geometry.Planes[region%len(s.geometry.Planes)].PageBytes, s.grids[region].PageStride
	if s.pages == 1 || stride == int64(page) {
		return 0, 0
	}
	return page, stride
}

// HostRegion is the memory of one plane.
type HostRegion struct {
	Data []byte
	Grid
}

// HostMemory is [Memory] in this process' address space: a client's shared memory, mapped here.
type HostMemory struct {
	shape
	data [][]byte // memory, by grid
}

// NewHostMemory checks that the regions hold their pages. There is one region per plane of g, in its order, for each
// unit.
func NewHostMemory(g kv.Geometry, regions []HostRegion) (*HostMemory, error) {
	m := &HostMemory{}
	grids := make([]Grid, len(regions))
	for i, r := range regions {
		grids[i], m.data = r.Grid, append(m.data, r.Data)
	}
	var err error
	m.shape, err = newShape(g, grids, func(i int) int64 { return int64(len(m.data[i])) })
	return m, err
}

// move copies a span of a block's pages to buf, or from it.
func (m *HostMemory) move(r *ExtentRange, span *kv.Span, buf []byte, gather bool) {
	region, at, wanted := m.find(r, span)
	if !wanted {
		return
	}
	data, buf := m.data[region][at:], buf[:span.Len]
	page, stride := m.rows(region)
	n, next := len(buf), int64(0)
	if page > 0 {
		in := span.PageOff % page
		n, next = min(n, int(page-in)), stride-int64(in)
	}
	for {
		if pages := data[:n]; gather {
			copy(buf, pages)
		} else {
			copy(pages, buf)
		}
		if buf = buf[n:]; len(buf) == 0 {
			return
		}
		data, n, next = data[next:], min(int(page), len(buf)), stride
	}
}

// Gather works extent by extent, so that the checksum reads bytes that the copy has just brought into the cache.
func (m *HostMemory) Gather(r ExtentRange, dst []byte) error {
	return Guard(m.data, func() error { return m.gather(&r, dst) })
}

func (m *HostMemory) gather(r *ExtentRange, dst []byte) error {
	for x := r.Lo; x < r.Hi; x++ {
		for c := m.spans(r, x, x+1); c.Next(); {
			m.move(r, &c.Span, dst[c.Span.Off-r.Base:], true)
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
		for c := m.spans(r, x, x+1); c.Next(); {
			m.move(r, &c.Span, src[c.Span.Off-r.Base:], false)
		}
	}
	return nil
}

// CheckBlocks refuses ids that are out of range and, unless holes are allowed, abi.None. It is called before any byte
// is touched.
func CheckBlocks(m Memory, ids []uint32, holes bool) error {
	if len(ids) != m.ChunkBlocks() {
		return fmt.Errorf("%w: %d ids for a chunk of %d blocks", ErrBlocks, len(ids), m.ChunkBlocks())
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
