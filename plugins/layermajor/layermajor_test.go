package layermajor

import (
	"slices"
	"testing"

	"github.com/kvhost/kvhost/abi"
)

func TestOrder(t *testing.T) {
	planes := []abi.Plane{
		{Layer: 1, Part: 1, PageBytes: 10}, {Layer: 0, Part: 1, PageBytes: 20}, {Layer: 1, PageBytes: 30}, {Layer: 0, PageBytes: 40},
	}
	got := (&Policy{}).Layout(abi.LayoutHeader{Blocks: 7, Planes: 4}, planes, make([]abi.Segment, 1))
	want := []abi.Segment{
		{}, {Plane: 3, Blocks: 7, PageLen: 40}, {Plane: 1, Blocks: 7, PageLen: 20}, {Plane: 2, Blocks: 7, PageLen: 30}, {Plane: 0, Blocks: 7, PageLen: 10},
	}
	if !slices.Equal(got, want) {
		t.Errorf("the layout is %+v, want %+v", got, want)
	}
}
