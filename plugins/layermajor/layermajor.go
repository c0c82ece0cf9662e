// Package layermajor is the first-party layout policy "layermajor": layer 0 K, layer 0 V, layer 1 K, and so on. Each
// plane has one segment over all blocks of the chunk. A layer is therefore one contiguous run that can be verified and
// reported as it arrives, in the order in which a forward pass needs it.
package layermajor

import (
	"cmp"
	"slices"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
)

// Policy is a [guest.Layouter].
type Policy struct{}

// New returns the policy, which has no state.
func New(guest.Info) (*Policy, error) { return &Policy{}, nil }

// Layout orders the planes by layer, then by part.
func (*Policy) Layout(h abi.LayoutHeader, planes []abi.Plane, dst []abi.Segment) []abi.Segment {
	start := len(dst)
	for i, p := range planes {
		dst = append(dst, abi.Segment{Plane: uint32(i), Blocks: h.Blocks, PageLen: p.PageBytes})
	}
	slices.SortStableFunc(dst[start:], func(a, b abi.Segment) int {
		pa, pb := planes[a.Plane], planes[b.Plane]
		return cmp.Or(cmp.Compare(pa.Layer, pb.Layer), cmp.Compare(pa.Part, pb.Part))
	})
	return dst
}
