package plugintest

import (
	"fmt"
	"slices"
	"unsafe"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/kv"
)

// geometries returns common chunks, and hard ones: one page, odd sizes, planes of several sizes in no order, the most
// blocks and planes.
func geometries() []kv.Geometry {
	planes := func(n int, parts uint32, size func(int) uint32) []kv.Plane {
		out := make([]kv.Plane, n)
		for i := range out {
			out[i] = kv.Plane{Layer: uint32(i) / parts, Part: uint32(i) % parts, PageBytes: size(i)}
		}
		return out
	}
	odd := planes(9, 3, func(i int) uint32 { return uint32(1 + 1237*i) })
	slices.Reverse(odd)
	return []kv.Geometry{
		{Blocks: 1, Planes: planes(1, 1, func(int) uint32 { return 1 })},
		{Blocks: 16, Planes: planes(160, 2, func(int) uint32 { return 4096 })},
		{Blocks: 16, Planes: planes(61, 1, func(int) uint32 { return 18432 })},
		{Blocks: 7, Planes: odd},
		{Blocks: 1, Planes: planes(kv.MaxPlanes, 2, func(int) uint32 { return 8192 })},
		{Blocks: kv.MaxBlocks, Planes: planes(2, 2, func(int) uint32 { return 2048 })},
		{Blocks: 4096, Planes: planes(256, 2, func(int) uint32 { return 512 })},
		{Blocks: 257, Planes: planes(256, 1, func(int) uint32 { return 1024 })},
	}
}

// layout checks a layout policy: each byte once, the same answer every time.
func (c *checker) layout() {
	p, err := c.arranger(0)
	if err != nil {
		c.r.add(err)
		return
	}
	defer p.Close()
	other, err := c.arranger(0)
	if err != nil {
		c.r.add(err)
		return
	}
	defer other.Close()
	long, err := c.arranger(8)
	if err != nil {
		c.r.add(err)
		return
	}
	defer long.Close()
	for i, g := range geometries() {
		if err := c.arrange(i, g, p, other, long); err != nil {
			c.r.add(err)
			return
		}
	}
	c.r.Memory = max(c.r.Memory, p.MemoryBytes())
	c.r.add(c.strangeNamespace(p))
	c.r.add(c.shortRecords(p, abi.ExportLayout))
}

func (c *checker) arrange(i int, g kv.Geometry, p, other, long *policy.Probe) error {
	segments, ok, err := c.segments(p, 0, uint32(i), g)
	if err != nil || !ok {
		return err
	}
	if _, err := kv.NewPlan(g, segments); err != nil {
		return c.finding(abi.ExportLayout, fmt.Sprintf("%v (%d blocks, %d planes)", err, g.Blocks, len(g.Planes)),
			"over all segments, each byte of each page exactly once; at most 65,536 segments")
	}
	for _, again := range []struct {
		p       *policy.Probe
		longer  uint32
		how, do string
	}{
		{p, 0, "asked twice, it answers otherwise", "the answer must follow from the arguments"},
		{other, 0, "another instance answers otherwise", "the answer must follow from the arguments"},
		{long, 8, "with records 8 bytes longer it answers otherwise",
			"step by the stride of the call, and read only what you know"},
	} {
		got, ok, err := c.segments(again.p, again.longer, uint32(i), g)
		if err != nil {
			return err
		}
		if !ok || !slices.Equal(got, segments) {
			return c.finding(abi.ExportLayout, fmt.Sprintf("%s (%d blocks, %d planes)", again.how, g.Blocks, len(g.Planes)),
				again.do)
		}
	}
	return nil
}

func (c *checker) arranger(longer uint32) (*policy.Probe, error) {
	return c.ready(longer, map[int]uint32{
		abi.BufferArgs: abi.LayoutHeaderSize + kv.MaxPlanes*(abi.PlaneSize+longer), abi.BufferResult: kv.MaxSegments * abi.SegmentSize,
	})
}

func (c *checker) segments(p *policy.Probe, longer, group uint32, g kv.Geometry) ([]abi.Segment, bool, error) {
	n, stride := uint32(len(g.Planes)), abi.PlaneSize+longer
	b, err := p.Bytes(abi.BufferArgs, abi.LayoutHeaderSize+n*stride)
	if err != nil {
		return nil, false, c.fault(abi.ExportLayout, "ARGS", err)
	}
	*(*abi.LayoutHeader)(unsafe.Pointer(&b[0])) = abi.LayoutHeader{Namespace: 1, Group: group, Blocks: g.Blocks, Planes: n}
	for i, v := range g.Planes {
		*(*abi.Plane)(unsafe.Pointer(&b[abi.LayoutHeaderSize+uint32(i)*stride])) = abi.Plane{Layer: v.Layer, Part: v.Part,
			PageBytes: v.PageBytes}
	}
	count, ok, err := c.good(p, abi.ExportLayout, uint64(n), uint64(stride), int(n*g.Blocks))
	if err != nil || !ok {
		return nil, false, err
	}
	if count > kv.MaxSegments {
		return nil, false, c.finding(abi.ExportLayout, fmt.Sprintf("it gives %d segments (%d blocks, %d planes)", count,
			g.Blocks, n), "at most 65,536: let a few blocks share each")
	}
	out, err := p.Bytes(abi.BufferResult, count*abi.SegmentSize)
	if err != nil {
		return nil, false, c.fault(abi.ExportLayout, "RESULT", err)
	}
	if count == 0 {
		return nil, true, nil
	}
	return slices.Clone(unsafe.Slice((*abi.Segment)(unsafe.Pointer(&out[0])), count)), true, nil
}
