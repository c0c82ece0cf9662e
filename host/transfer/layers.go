package transfer

import (
	"sync/atomic"

	"github.com/kvhost/kvhost/host/chunk"
)

// layers counts down the bytes that each layer of a load still misses, over all chunks, and reports a layer when the
// last of them has landed. Counting bytes and not segments keeps it right when chunks were written under different plans.
type layers struct {
	report func(uint32)
	index  map[uint32]int
	ids    []uint32
	left   []atomic.Int64
}

func newLayers(g chunk.Geometry, chunks int, report func(uint32)) *layers {
	l := &layers{report: report, index: map[uint32]int{}}
	var bytes []int64
	for _, p := range g.Planes {
		i, ok := l.index[p.Layer]
		if !ok {
			i = len(l.ids)
			l.index[p.Layer] = i
			l.ids = append(l.ids, p.Layer)
			bytes = append(bytes, 0)
		}
		bytes[i] += int64(p.PageBytes) * int64(g.Blocks) * int64(chunks)
	}
	l.left = make([]atomic.Int64, len(bytes))
	for i, n := range bytes {
		l.left[i].Store(n)
	}
	return l
}

func (l *layers) landed(p *chunk.Plan, lo, hi int) {
	segments, planes := p.Segments(), p.Geometry().Planes
	for _, e := range p.Extents()[lo:hi] {
		i := l.index[planes[segments[e.Segment].Plane].Layer]
		if l.left[i].Add(-int64(e.Len)) == 0 {
			l.report(l.ids[i])
		}
	}
}
