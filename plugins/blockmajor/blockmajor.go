// Package blockmajor is the layout policy "blockmajor". The pages of block 0 come first, then those of block 1, and so
// on. Within a block, the planes are ordered by layer and part. A block is one contiguous run, so a load of a part of a
// chunk reads only that part. There are two costs: no layer is complete before the last block has arrived, and there is
// a segment for each block and plane. If that would be more segments than a plan may have, each segment covers a few
// blocks.
package blockmajor

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

// maxSegments is the maximum number of segments of a plan.
const maxSegments = 1 << 16

// Layout orders pages by block, then by layer, then by part.
func (*Policy) Layout(h abi.LayoutHeader, planes []abi.Plane, dst []abi.Segment) []abi.Segment {
	start := len(dst)
	for i, p := range planes {
		dst = append(dst, abi.Segment{Plane: uint32(i), PageLen: p.PageBytes})
	}
	order := dst[start:]
	slices.SortStableFunc(order, func(a, b abi.Segment) int {
		pa, pb := planes[a.Plane], planes[b.Plane]
		return cmp.Or(cmp.Compare(pa.Layer, pb.Layer), cmp.Compare(pa.Part, pb.Part))
	})
	together := uint32(1)
	for uint64((h.Blocks+together-1)/together)*uint64(len(planes)) > maxSegments {
		together++
	}
	for block := uint32(0); block < h.Blocks; block += together {
		for i := range planes {
			s := dst[start+i]
			s.Block, s.Blocks = block, min(together, h.Blocks-block)
			if block == 0 {
				dst[start+i] = s
			} else {
				dst = append(dst, s)
			}
		}
	}
	return dst
}
