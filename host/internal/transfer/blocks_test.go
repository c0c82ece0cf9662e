package transfer

import (
	"errors"
	"slices"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
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
