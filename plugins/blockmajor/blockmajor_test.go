package blockmajor

import (
	"slices"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/abi/testenv"
)

func layout(t *testing.T, blocks uint32, planes []abi.Plane) []abi.Segment {
	t.Helper()
	p, err := New(guest.Info{})
	testenv.OK(t, err)
	return p.Layout(abi.LayoutHeader{Blocks: blocks, Planes: uint32(len(planes))}, planes, nil)
}

func TestOrder(t *testing.T) {
	got := layout(t, 2, []abi.Plane{{Layer: 1, Part: 0, PageBytes: 30}, {Layer: 0, Part: 1, PageBytes: 20}, {Layer: 0, Part: 0, PageBytes: 10}})
	want := []abi.Segment{
		{Plane: 2, Block: 0, Blocks: 1, PageLen: 10}, {Plane: 1, Block: 0, Blocks: 1, PageLen: 20}, {Plane: 0, Block: 0, Blocks: 1, PageLen: 30},
		{Plane: 2, Block: 1, Blocks: 1, PageLen: 10}, {Plane: 1, Block: 1, Blocks: 1, PageLen: 20}, {Plane: 0, Block: 1, Blocks: 1, PageLen: 30},
	}
	if !slices.Equal(got, want) {
		t.Errorf("the layout is %+v, want %+v", got, want)
	}
}

// Every page exactly once, within the limit, however large the chunk.
func TestCoversEverything(t *testing.T) {
	for _, c := range []struct{ blocks, planes uint32 }{{1, 1}, {16, 160}, {256, 256}, {257, 256}, {4096, 200}, {1000, 1000}} {
		planes := make([]abi.Plane, c.planes)
		for i := range planes {
			planes[i] = abi.Plane{Layer: uint32(i) / 2, Part: uint32(i) % 2, PageBytes: 4096}
		}
		got := layout(t, c.blocks, planes)
		if len(got) > maxSegments {
			t.Errorf("%d blocks of %d planes make %d segments", c.blocks, c.planes, len(got))
		}
		next := make([]uint32, c.planes)
		for _, s := range got {
			if s.Block != next[s.Plane] || s.PageOff != 0 || s.PageLen != 4096 || s.Gap != 0 {
				t.Fatalf("segment %+v after block %d", s, next[s.Plane])
			}
			next[s.Plane] += s.Blocks
		}
		for plane, n := range next {
			if n != c.blocks {
				t.Fatalf("plane %d has %d blocks of %d", plane, n, c.blocks)
			}
		}
	}
}
