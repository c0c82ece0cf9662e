package transfer_test

import (
	"testing"

	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/transfer"
	"github.com/kvhost/kvhost/host/kv"
)

// BenchmarkPiece stores small pieces, and loads one again and again, whole and by layers, by each route that host memory has:
// what a route costs besides the bytes that it moves.
func BenchmarkPiece(b *testing.B) {
	geo := kv.Uniform(2, 2, 1, 4096)
	small := func(c *store.Config) { c.Roots[0].Capacity = 16 << 20 } // a store evicts
	inMemory := func(b *testing.B) *bench {
		made, _ := newMemoryBench(b, geo, geo.Blocks, 1, small)
		return made
	}
	for name, make := range map[string]func(b *testing.B) *bench{
		"memory":             inMemory,
		"staged":             func(b *testing.B) *bench { return newBench(b, geo, geo.Blocks, small) },
		"staged, compressed": func(b *testing.B) *bench { return newCompressed(b, geo, geo.Blocks, small) },
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
		b.Run(name+"/store", func(b *testing.B) {
			r := make(b)
			b.ReportAllocs()
			for n := 0; b.Loop(); n++ {
				if _, out := r.storeAll(r.put(n, []uint32{0, 1})); len(out.Failed) > 0 {
					b.Fatal(out.Failed)
				}
			}
		})
	}
}
