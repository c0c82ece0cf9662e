package transfer

import (
	"github.com/kvhost/kvhost/host/kv"
)

// Layers makes a load layer-wise: the geometry's first layer of all chunks is read before the second of any, and so on. A
// model's forward pass can start with its first layer while the others are being read.
//
// Later layers may be read several at a time, and each is still reported.
//
// The layout decides where a layer is in a file. If it keeps a layer's pages together, as the built-in one does,
// each chunk and layer costs one read; otherwise it costs more reads.
type Layers struct {
	// Landed runs once for each layer, in order, when the copies of that layer and of all earlier ones have ended. The
	// layer's pages of every chunk that is not in failed then have verified bytes. Landed does not run after the job's
	// Done.
	Landed func(layer uint32, failed []int)
}

// LayersOf lists a geometry's layers in its order.
func LayersOf(g kv.Geometry) (list []uint32) {
	seen := map[uint32]bool{}
	for _, p := range g.Planes {
		if !seen[p.Layer] {
			seen[p.Layer] = true
			list = append(list, p.Layer)
		}
	}
	return list
}

// run is a range [lo, hi) of a plan's extents, or of an order's layers.
type run struct{ lo, hi int }

// mostTogether bounds the layers of one step, since a consumer of its first layer waits for the last.
const mostTogether = 8

// partsOf divides an order of layers into steps. The first layer is alone, since the consumer waits for it. A later
// step has at most as many layers as all steps before it, so a consumer never waits much longer than it was busy with
// the earlier layers. One layer of one chunk is often too small to be worth a kernel launch and a wait, so steps grow
// until a chunk has most bytes in one step.
func partsOf(g kv.Geometry, order []uint32, most int) (parts []run) {
	bytes := map[uint32]int{}
	for _, p := range g.Planes {
		bytes[p.Layer] += int(g.Blocks) * int(p.PageBytes)
	}
	for lo := 0; lo < len(order); {
		limit := min(max(1, lo), mostTogether)
		hi, sum := lo+1, bytes[order[lo]]
		for hi < len(order) && hi-lo < limit && sum+bytes[order[hi]] <= most {
			sum += bytes[order[hi]]
			hi++
		}
		parts = append(parts, run{lo, hi})
		lo = hi
	}
	return parts
}

// runsOf returns, for each step of the order, the fewest runs of extents that hold it in a plan's payload.
func runsOf(p *kv.Plan, order []uint32, parts []run) [][]run {
	step := make(map[uint32]int, len(order))
	for i, part := range parts {
		for _, l := range order[part.lo:part.hi] {
			step[l] = i
		}
	}
	runs := make([][]run, len(parts))
	planes := p.Geometry().Planes
	for i, s := range p.Segments() {
		lo, hi := p.SegmentExtents(i)
		of := &runs[step[planes[s.Plane].Layer]]
		if n := len(*of); n > 0 && (*of)[n-1].hi == lo {
			(*of)[n-1].hi = hi
			continue
		}
		*of = append(*of, run{lo, hi})
	}
	return runs
}
