package transfer

import (
	"github.com/kvhost/kvhost/host/chunk"
)

// Layers makes a load layer-wise: the first layer of all chunks is read before the second of any, and so on, so that a
// model's forward pass can begin with its first layer while the others are still on their way.
//
// Later layers may come some at a time, as one part of the load; each is told of all the same.
//
// Where a layer stands in a file is for the layout to say. One that keeps a layer's pages together, as the built-in one
// does, costs one read for each chunk and layer; another costs more reads, and loses nothing else.
type Layers struct {
	// Order is the geometry's layers, each once, as they are needed. Nil: as the geometry has them.
	Order []uint32
	// Ahead, where it is not 0, bounds how far the load runs ahead of its consumer: no layer is begun that is Ahead or
	// more after those that Handle.Advance has named. 0 waits for nobody.
	Ahead int
	// Landed runs once for each layer, in order, when nothing of it or of an earlier one is under way any more: its pages
	// of every chunk that is not in failed hold their bytes, verified. It is not called after the job's Done.
	Landed func(layer uint32, failed []int)
}

// LayersOf lists a geometry's layers as they come.
func LayersOf(g chunk.Geometry) (list []uint32) {
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

// mostTogether is the most layers that are brought together: a consumer of the first of them waits for the last.
const mostTogether = 8

// partsOf divides an order into what is brought together: the first layer alone, since the consumer waits for that, and after
// it as many at a time as have landed before, so that a consumer never waits much longer than it has had work. One layer of
// one chunk is often too little to be worth a launch and a wait: parts grow until a chunk has most bytes of one.
func partsOf(g chunk.Geometry, order []uint32, ahead, most int) (parts []run) {
	bytes := map[uint32]int{}
	for _, p := range g.Planes {
		bytes[p.Layer] += int(g.Blocks) * int(p.PageBytes)
	}
	for lo := 0; lo < len(order); {
		limit := min(max(1, lo), mostTogether)
		if ahead > 0 {
			limit = min(limit, max(1, ahead/2)) // the next part is on its way while one is consumed
		}
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

// runsOf finds where each part of the order stands in a plan's payload: the fewest runs of extents.
func runsOf(p *chunk.Plan, order []uint32, parts []run) [][]run {
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
