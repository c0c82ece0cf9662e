package transfer

import (
	"testing"

	"github.com/kvhost/kvhost/host/store"
)

// Pages of a GPU are compressed and decompressed by the staged route, also where pieces go direct.
func TestCompressedPiecesOfAGPUAreStaged(t *testing.T) {
	for name, geo := range deviceShapes {
		t.Run(name, func(t *testing.T) {
			r := newDeviceRig(t, geo, 64, 32<<20, func(c *store.Config) { c.Roots[0].Compressed = true })
			r.float = true
			r.route(RouteChoice{})
			const n = 5
			var chunks []StoreChunk
			from := r.shuffled(n)
			compresses := false
			for c := range n {
				chunks = append(chunks, r.put(c, from[c]))
				compresses = chunks[c].Put.Compresses()
			}
			if read, out := r.storeAll(chunks...); len(read.Failed)+len(out.Failed) > 0 {
				t.Fatal(read, out)
			}
			r.poison()
			ids := r.shuffled(n)
			if out := r.load([]int{0, 1, 2, 3, 4}, ids); len(out.Failed) > 0 {
				t.Fatal(out.Failed)
			}
			for c := range n {
				if err := r.holds(c, ids[c], false); err != nil {
					t.Error(err)
				}
			}
			route := "direct"
			if compresses {
				route = "staged"
			} else if name != "tiny pages" {
				t.Error("a piece that is not tiny is not compressed")
			}
			if took := r.took(); len(took) != 1 || took[route] != 2*n {
				t.Errorf("pieces by route: %v, want all %s", took, route)
			}
			if s := r.store.Compression()[0]; compresses && (s.Encoded.Pages != n*geo.PageBytes() || s.Decoded.Pages != n*geo.PageBytes()) {
				t.Errorf("encoded %+v, decoded %+v", s.Encoded, s.Decoded)
			}
		})
	}
}
