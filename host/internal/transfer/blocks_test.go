package transfer

import (
	"bytes"
	"errors"
	"slices"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/kv"
)

// A layer-wise load knows which of its chunks name blocks that are not there before any step of them can begin.
func TestLayerwiseBlocksAreCheckedFirst(t *testing.T) {
	geo := kv.Uniform(2, 3, 1, 4096)
	var regions []HostRegion
	for range geo.Planes {
		regions = append(regions, HostRegion{Data: make([]byte, 4*4096), Grid: Grid{Stride: 4096, Blocks: 4}})
	}
	m, err := NewHostMemory(geo, regions)
	testenv.OK(t, err)
	q := &Queue{engine: &Engine{cfg: Config{Threads: 1}}}
	l := q.loadLayers(newFence(3, nil, nil), &LoadJob{
		Lease:  &store.Lease{}, // which nothing is looked up in
		Memory: m, Layers: &Layers{}, Chunks: []LoadChunk{{Blocks: []uint32{0, 1}}, {Blocks: []uint32{2, 4}},
			{Blocks: []uint32{3}}},
	})
	for i, wrong := range []bool{false, true, true} {
		if err := l.chunks[i].err; errors.Is(err, ErrBlocks) != wrong {
			t.Errorf("chunk %d: %v", i, err)
		}
	}
}

// Pages of a block that lie apart, or side by side, are gathered and scattered whole, where extents end within them too, and nothing around
// them is touched; no copy allocates.
func TestPagesOfABlockLieApart(t *testing.T) {
	const page, pages, chunkBlocks, blocks = 1000, 16, 8, 11 // 128,000 bytes of a plane: two extents, which end within a page
	geo := kv.Uniform(chunkBlocks*pages, 1, 2, page)
	plan, err := kv.NewPlan(geo, []kv.Segment{
		{Plane: 1, Blocks: geo.Blocks, PageLen: page}, {Plane: 0, Block: 3, Blocks: geo.Blocks - 3, PageLen: 600},
		{Plane: 0, Blocks: 3, PageLen: page}, {Plane: 0, Block: 3, Blocks: geo.Blocks - 3, PageOff: 600, PageLen: 400},
	})
	testenv.OK(t, err)
	for _, stride := range []int64{page, page + 24, 3 * page} {
		grid := Grid{Offset: 8, Stride: (pages-1)*stride + page + 40, Blocks: blocks, Pages: pages, PageStride: stride}
		size := 8 + blocks*grid.Stride
		planes := [2][]byte{make([]byte, size), make([]byte, size)}
		testenv.Fill(planes[0], 1)
		testenv.Fill(planes[1], 2)
		m, err := NewHostMemory(geo, []HostRegion{{planes[0], grid}, {planes[1], grid}})
		testenv.OK(t, err)
		ids := []uint32{7, 0, 3, abi.None, 10, 1, 9, 2}
		want := make([]byte, plan.PayloadBytes())
		before := [2][]byte{slices.Clone(planes[0]), slices.Clone(planes[1])}
		for c := plan.Spans(0, len(plan.Extents()), 1); c.Next(); {
			if id := ids[c.Span.Block/pages]; id != abi.None {
				at := grid.Offset + int64(id)*grid.Stride + int64(c.Span.Block%pages)*stride + int64(c.Span.PageOff)
				copy(want[c.Span.Off:][:c.Span.Len], planes[c.Span.Plane][at:])
				clear(before[c.Span.Plane][at:][:c.Span.Len])
			}
		}
		got := make([]byte, len(want))
		r := ExtentRange{Plan: plan, Hi: len(plan.Extents()), Blocks: ids, Table: make([]uint64, len(plan.Extents()))}
		testenv.OK(t, m.Gather(r, got))
		if !bytes.Equal(got, want) {
			t.Errorf("stride %d: other bytes are gathered than the pages hold", stride)
		}
		kv.SumExtents(plan, 0, r.Hi, make([]byte, len(want)), 0, r.Table)
		testenv.OK(t, m.Scatter(r, make([]byte, len(want))))
		if !bytes.Equal(planes[0], before[0]) || !bytes.Equal(planes[1], before[1]) {
			t.Errorf("stride %d: zeros are not where the pages are, or elsewhere too", stride)
		}
		if n := testing.AllocsPerRun(10, func() { m.gather(&r, got) }); n != 0 {
			t.Errorf("stride %d: a gather allocates %v times", stride, n)
		}
	}
}

// A GPU's pages of a block that lie apart are moved as they are in this process' memory, with windows and without.
func TestPagesOfABlockLieApartOnAGPU(t *testing.T) {
	const page, pages, chunkBlocks, blocks = 1000, 16, 8, 11
	geo := kv.Uniform(chunkBlocks*pages, 1, 1, page)
	plan, err := kv.NewPlan(geo, []kv.Segment{
		{Block: 3, Blocks: geo.Blocks - 3, PageLen: 600}, {Blocks: 3, PageLen: page}, {Block: 3, Blocks: geo.Blocks - 3, PageOff: 600, PageLen: 400},
	})
	testenv.OK(t, err)
	whole, err := kv.NewPlan(geo, []kv.Segment{{Blocks: geo.Blocks, PageLen: page}})
	testenv.OK(t, err)
	rig := newDeviceRig(t, geo, blocks*pages, 16<<20)
	for _, stride := range []int64{page, page + 24, 3 * page} {
		grid := Grid{Offset: 8, Stride: (pages-1)*stride + page + 40, Blocks: blocks, Pages: pages, PageStride: stride}
		size := 8 + blocks*grid.Stride
		buffer, err := rig.gpu.Alloc(size)
		testenv.OK(t, err)
		device, err := NewDeviceMemory(rig.gpu, geo, []DeviceRegion{{buffer.Address, size, grid}})
		testenv.OK(t, err)
		data := make([]byte, size)
		host, err := NewHostMemory(geo, []HostRegion{{data, grid}})
		testenv.OK(t, err)
		for _, p := range []*kv.Plan{plan, whole} {
			testenv.Fill(data, 3)
			rig.on(func(th *gds.Thread) error { return th.Write(buffer.Address, data) })
			n, ids := len(p.Extents()), []uint32{7, 0, 3, 5, 10, 1, 9, 2}
			r := ExtentRange{Plan: p, Hi: n, Blocks: ids, Table: make([]uint64, n)}
			want, got := make([]byte, p.PayloadBytes()), make([]byte, p.PayloadBytes())
			testenv.OK(t, host.Gather(r, want))
			testenv.OK(t, rig.engine.withSlot(func(slot []byte) error {
				clear(slot)
				err := device.Gather(r, slot[:len(got)])
				copy(got, slot)
				return err
			}))
			if !bytes.Equal(got, want) {
				t.Errorf("stride %d: other bytes are gathered than the pages hold", stride)
			}
			ids[3] = abi.None // is not wanted
			testenv.Fill(want, 4)
			kv.SumExtents(p, 0, n, want, 0, r.Table)
			testenv.OK(t, host.Scatter(r, want))
			testenv.OK(t, rig.engine.withSlot(func(slot []byte) error { return device.Scatter(r, slot[:copy(slot, want)]) }))
			image := make([]byte, size)
			rig.on(func(th *gds.Thread) error { return th.Read(image, buffer.Address) })
			if !bytes.Equal(image, data) {
				t.Errorf("stride %d: bytes are scattered elsewhere than in this process' memory", stride)
			}
		}
		testenv.OK(t, buffer.Free())
	}
}

// The first layer comes alone, then as many as have landed, up to what a launch is worth.
func TestPartsOfAnOrder(t *testing.T) {
	llama, mla := kv.Uniform(16, 32, 1, 64<<10), kv.Uniform(16, 61, 1, 18432)
	for _, c := range []struct {
		name string
		geo  kv.Geometry
		most int
		want []int // layers of each part
	}{
		{"four of 1 MiB fit", llama, 4 << 20, []int{1, 1, 2, 4, 4, 4, 4, 4, 4, 4}},
		{"none fits", llama, 1 << 19, slices.Repeat([]int{1}, 32)},
		{"small layers", mla, 4 << 20, []int{1, 1, 2, 4, 8, 8, 8, 8, 8, 8, 5}},
		{"one layer", kv.Uniform(1, 1, 1, 4096), 4 << 20, []int{1}},
	} {
		order := LayersOf(c.geo)
		slices.Reverse(order)
		var got []int
		at := 0
		for _, p := range partsOf(c.geo, order, c.most) {
			if p.lo != at || p.hi <= p.lo {
				t.Fatalf("%s: a part of %+v after %d layers", c.name, p, at)
			}
			got, at = append(got, p.hi-p.lo), p.hi
		}
		if !slices.Equal(got, c.want) || at != len(order) {
			t.Errorf("%s: parts of %v layers, want %v", c.name, got, c.want)
		}
	}
}
