package transfer

import (
	"errors"
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
		regions = append(regions, HostRegion{Data: make([]byte, 4*4096), Stride: 4096, Blocks: 4})
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
