package transfer_test

import (
	"testing"

	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/transfer"
)

// BenchmarkPiece loads one small piece again and again, whole and by layers, by each route that host memory has: what a route
// costs besides the bytes that it moves.
func BenchmarkPiece(b *testing.B) {
	geo := chunk.Uniform(2, 2, 1, 4096)
	inMemory := func(b *testing.B) *bench {
		made, _ := newMemoryBench(b, geo, geo.Blocks, 1)
		return made
	}
	for name, make := range map[string]func(b *testing.B) *bench{
		"memory":             inMemory,
		"staged":             func(b *testing.B) *bench { return newBench(b, geo, geo.Blocks) },
		"staged, compressed": func(b *testing.B) *bench { return newCompressed(b, geo, geo.Blocks) },
	} {
		for how, layers := range map[string]*transfer.Layers{"whole": nil, "by layers": {}} {
			b.Run(name+"/"+how, func(b *testing.B) {
				r := make(b)
				r.storeChunks(1)
				l := r.lease(0)
				defer l.Release()
				loads := r.spread(1)
				b.ReportAllocs()
				for b.Loop() {
					if out := r.load(l, loads, layers); len(out.Failed) > 0 {
						b.Fatal(out.Failed)
					}
				}
			})
		}
	}
}
