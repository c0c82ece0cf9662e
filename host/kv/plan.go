package kv

import (
	"encoding/binary"
	"fmt"
	"slices"
	"sort"
)

// ExtentBytes is the maximum number of bytes under one checksum. Every segment begins a new extent, so that a segment
// can be verified, and a layer reported, as it arrives.
const ExtentBytes = 64 << 10

// Extent is a run of payload bytes under one checksum.
type Extent struct {
	Off     int64 // offset in the payload
	Len     int32
	Segment int32
}

// Span is a contiguous part of the payload that belongs to one page, or to several pages that are joined.
type Span struct {
	Off     int64  // offset in the payload
	Plane   uint32 // index into Geometry.Planes
	Block   uint32 // block in the chunk; the first one if several are joined
	PageOff uint32 // offset in its page
	Len     uint32
}

// Segment is a run of a payload: the byte range [PageOff, PageOff+PageLen) of the pages of Blocks consecutive blocks of one
// plane, one after the other. Gap zero bytes precede it.
type Segment struct {
	Plane   uint32 // index into Geometry.Planes
	Block   uint32 // first block in the chunk
	Blocks  uint32
	PageOff uint32
	PageLen uint32
	Gap     uint32
}

const segmentSize = 24 // bytes of a segment in an encoded plan

// AnySegment is a [Segment], or a type with the same fields as in the policy ABI.
type AnySegment interface {
	~struct{ Plane, Block, Blocks, PageOff, PageLen, Gap uint32 }
}

// Plan is the order of a chunk's page bytes in a payload. It is immutable. Its digest names it on disk, so that a file
// that was written under one layout policy stays readable under the next.
type Plan struct {
	geometry Geometry
	segments []Segment
	offsets  []int64 // offset of each segment's first byte, after its gap
	extents  []Extent
	firstExt []int32 // first extent of each segment
	payload  int64
	digest   Digest
	encoded  []byte
}

// MaxSegments is the maximum number of segments of a plan.
const MaxSegments = 1 << 16

// MinGaps is the number of gap bytes that any plan may have. A plan with more page bytes than that may have as many gap
// bytes as page bytes, so gaps never more than double a piece of 64 KiB or more.
const MinGaps = 64 << 10

// NewPlan returns a plan with the given segments. It checks that they cover each byte of each page exactly once.
func NewPlan[S AnySegment](g Geometry, records []S) (*Plan, error) {
	if err := g.Validate(); err != nil {
		return nil, err
	}
	if len(records) == 0 || len(records) > MaxSegments {
		return nil, fmt.Errorf("%w: %d segments, want 1 to %d", ErrPlan, len(records), MaxSegments)
	}
	segments := make([]Segment, len(records))
	for i, r := range records {
		segments[i] = Segment(r)
	}
	p := &Plan{
		geometry: Geometry{Blocks: g.Blocks, Planes: slices.Clone(g.Planes)},
		segments: segments,
		offsets:  make([]int64, len(segments)),
		firstExt: make([]int32, len(segments)+1),
	}
	gaps, most := int64(0), max(p.geometry.PageBytes(), MinGaps)
	for i, s := range segments {
		if err := p.geometry.holds(s); err != nil {
			return nil, fmt.Errorf("%w: segment %d %s", ErrPlan, i, err)
		}
		if gaps += int64(s.Gap); gaps > most {
			return nil, fmt.Errorf("%w: more than %d bytes of gaps up to segment %d", ErrPlan, most, i)
		}
		p.payload += int64(s.Gap)
		p.offsets[i] = p.payload
		n := segmentBytes(s)
		for off := int64(0); off < n; off += ExtentBytes {
			p.extents = append(p.extents, Extent{Off: p.payload + off, Len: int32(min(ExtentBytes, n-off)), Segment: int32(i)})
		}
		p.payload += n
		p.firstExt[i+1] = int32(len(p.extents))
	}
	if err := p.geometry.partitioned(segments); err != nil {
		return nil, fmt.Errorf("%w: %s", ErrPlan, err)
	}
	p.encoded = p.encode()
	p.digest = digest(p.encoded)
	return p, nil
}

func segmentBytes(s Segment) int64 { return int64(s.Blocks) * int64(s.PageLen) }

func (g *Geometry) holds(s Segment) error {
	switch {
	case uint64(s.Plane) >= uint64(len(g.Planes)):
		return fmt.Errorf("names plane %d of %d", s.Plane, len(g.Planes))
	case s.Blocks == 0 || uint64(s.Block)+uint64(s.Blocks) > uint64(g.Blocks):
		return fmt.Errorf("covers blocks %d to %d of %d", s.Block, uint64(s.Block)+uint64(s.Blocks), g.Blocks)
	case s.PageLen == 0 || uint64(s.PageOff)+uint64(s.PageLen) > uint64(g.Planes[s.Plane].PageBytes):
		return fmt.Errorf("covers page bytes %d to %d of %d", s.PageOff, uint64(s.PageOff)+uint64(s.PageLen), g.Planes[s.Plane].PageBytes)
	case s.Gap >= 4096:
		return fmt.Errorf("has a gap of %d bytes, at most 4095", s.Gap)
	}
	return nil
}

// partitioned checks that segments, each within bounds, cover every page byte exactly once. A segment is a rectangle in
// the grid of blocks and bytes of its plane. The rectangles must not overlap, and their areas must add up to the area
// of the plane.
func (g *Geometry) partitioned(segments []Segment) error {
	byPlane := make([][]Segment, len(g.Planes))
	for _, s := range segments {
		byPlane[s.Plane] = append(byPlane[s.Plane], s)
	}
	for plane, list := range byPlane {
		var area uint64
		for _, s := range list {
			area += uint64(s.Blocks) * uint64(s.PageLen)
		}
		if want := uint64(g.Blocks) * uint64(g.Planes[plane].PageBytes); area != want {
			return fmt.Errorf("plane %d: segments hold %d bytes, its pages %d", plane, area, want)
		}
		if err := disjoint(list, g.Blocks); err != nil {
			return fmt.Errorf("plane %d: %w", plane, err)
		}
	}
	return nil
}

// disjoint checks for each block that the byte ranges in it do not overlap.
func disjoint(list []Segment, blocks uint32) error {
	starts := slices.Clone(list)
	sort.Slice(starts, func(i, j int) bool { return starts[i].Block < starts[j].Block })
	var live []Segment
	for b := uint32(0); b < blocks; b++ {
		n := len(live)
		live = slices.DeleteFunc(live, func(s Segment) bool { return b >= s.Block+s.Blocks })
		changed := len(live) != n
		for len(starts) > 0 && starts[0].Block == b {
			live = append(live, starts[0])
			starts = starts[1:]
			changed = true
		}
		if !changed {
			continue
		}
		sort.Slice(live, func(i, j int) bool { return live[i].PageOff < live[j].PageOff })
		for i := 1; i < len(live); i++ {
			if live[i-1].PageOff+live[i-1].PageLen > live[i].PageOff {
				return fmt.Errorf("block %d: page byte %d twice", b, live[i].PageOff)
			}
		}
	}
	return nil
}

// Geometry returns the geometry of the chunk.
func (p *Plan) Geometry() Geometry { return p.geometry }

// Digest returns the digest that names the plan.
func (p *Plan) Digest() Digest { return p.digest }

// PayloadBytes returns the length of the payload including gaps.
func (p *Plan) PayloadBytes() int64 { return p.payload }

// Segments returns the segments in payload order. The caller must not change the slice.
func (p *Plan) Segments() []Segment { return p.segments }

// Extents returns the extents in payload order. The caller must not change the slice.
func (p *Plan) Extents() []Extent { return p.extents }

// SegmentExtents returns the range [lo, hi) of the extents of segment i.
func (p *Plan) SegmentExtents(i int) (lo, hi int) { return int(p.firstExt[i]), int(p.firstExt[i+1]) }

// Cursor walks the spans of a range of extents in payload order without allocating:
//
//	for c := p.Spans(lo, hi, 1); c.Next(); {
//		use(c.Span)
//	}
type Cursor struct {
	Span Span
	plan *Plan
	join int64
	ext  int
	hi   int
	rel  int64 // offset in the segment
	left int64 // remaining bytes of the extent
}

// Spans returns a cursor over the extents [lo, hi). Consecutive whole pages are joined to one span, at most join blocks,
// beginning at multiples of join.
func (p *Plan) Spans(lo, hi int, join uint32) Cursor {
	return Cursor{plan: p, join: int64(join), ext: lo - 1, hi: hi}
}

// Next moves to the next span. It returns false if there is none.
func (c *Cursor) Next() bool {
	p := c.plan
	if c.left == 0 {
		if c.ext+1 >= c.hi {
			return false
		}
		c.ext++
		e := &p.extents[c.ext]
		c.rel, c.left = e.Off-p.offsets[e.Segment], int64(e.Len)
	}
	i := p.extents[c.ext].Segment
	s := &p.segments[i]
	page, join := int64(s.PageLen), c.join
	if s.PageLen != p.geometry.Planes[s.Plane].PageBytes {
		join = 1
	}
	at := int64(s.Block)*page + c.rel // as if the pages of the plane consisted of this part alone
	first := at / (page * join) * join
	in := at - first*page
	n := min(c.left, page*join-in)
	c.Span = Span{Off: p.offsets[i] + c.rel, Plane: s.Plane, Block: uint32(first), PageOff: s.PageOff + uint32(in), Len: uint32(n)}
	c.rel += n
	c.left -= n
	return true
}

// Extent returns the index of the extent to which the current span belongs.
func (c *Cursor) Extent() int { return c.ext }

// planMagic begins an encoded plan.
const planMagic = "kvplan01"

func (p *Plan) encode() []byte {
	b := make([]byte, 0, 16+12*len(p.geometry.Planes)+segmentSize*len(p.segments))
	b = append(b, planMagic...)
	le := binary.LittleEndian
	b = le.AppendUint32(b, p.geometry.Blocks)
	b = le.AppendUint32(b, uint32(len(p.geometry.Planes)))
	for _, pl := range p.geometry.Planes {
		b = le.AppendUint32(b, pl.Layer)
		b = le.AppendUint32(b, pl.Part)
		b = le.AppendUint32(b, pl.PageBytes)
	}
	b = le.AppendUint32(b, uint32(len(p.segments)))
	for _, s := range p.segments {
		for _, v := range [...]uint32{s.Plane, s.Block, s.Blocks, s.PageOff, s.PageLen, s.Gap} {
			b = le.AppendUint32(b, v)
		}
	}
	return b
}

// Encoded returns the form of the plan on disk. The caller must not change the slice.
func (p *Plan) Encoded() []byte { return p.encoded }

// DecodePlan decodes a plan and checks all of it.
func DecodePlan(b []byte) (*Plan, error) {
	d := decoder{b: b}
	if string(d.take(len(planMagic))) != planMagic {
		return nil, fmt.Errorf("%w: not a plan", ErrPlan)
	}
	g := Geometry{Blocks: d.u32()}
	planes := d.count(MaxPlanes)
	for range planes {
		g.Planes = append(g.Planes, Plane{Layer: d.u32(), Part: d.u32(), PageBytes: d.u32()})
	}
	var segments []Segment
	for range d.count(MaxSegments) {
		segments = append(segments, Segment{
			Plane: d.u32(), Block: d.u32(), Blocks: d.u32(), PageOff: d.u32(), PageLen: d.u32(), Gap: d.u32(),
		})
	}
	if d.short || len(d.b) != 0 {
		return nil, fmt.Errorf("%w: wrong length", ErrPlan)
	}
	return NewPlan(g, segments)
}

type decoder struct {
	b     []byte
	short bool
}

func (d *decoder) take(n int) []byte {
	if len(d.b) < n {
		d.short, d.b = true, nil
		return nil
	}
	out := d.b[:n]
	d.b = d.b[n:]
	return out
}

func (d *decoder) u32() uint32 {
	if b := d.take(4); b != nil {
		return binary.LittleEndian.Uint32(b)
	}
	return 0
}

// count reads a length, which must not exceed limit. For a wrong length it returns 0 and marks the input as too short.
func (d *decoder) count(limit int) int {
	n := int(d.u32())
	if n > limit || n > len(d.b) {
		d.short = true
		return 0
	}
	return n
}
