package server

import (
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/client"
)

// BenchmarkPing is the round trip of the smallest message.
func BenchmarkPing(b *testing.B) {
	p := newRig(b, nil).dial(nil)
	b.ReportAllocs()
	for b.Loop() {
		testenv.OK(b, p.Ping(b.Context()))
	}
}

// BenchmarkLookup asks for 1,000 keys: of which none is there, and all.
func BenchmarkLookup(b *testing.B) {
	const n = 1000
	for _, c := range []struct {
		name string
		hits int
	}{{"miss", 0}, {"hit", n}} {
		b.Run(c.name, func(b *testing.B) {
			p := newRig(b, nil).dial(nil)
			for at := 0; at < c.hits; at += arenaBlocks / chunkBlocks {
				var list []client.StoreChunk
				for k := at; k < min(c.hits, at+arenaBlocks/chunkBlocks); k++ {
					list = append(list, chunkOf(k, k-at))
				}
				if _, err := p.store(list); err != nil {
					b.Fatal(err)
				}
			}
			q := client.LookupRequest{Keys: keys(n)}
			b.ReportAllocs()
			for b.Loop() {
				l, err := p.Lookup(b.Context(), q)
				if err != nil || l.Hits() != c.hits {
					b.Fatal(l.Hits(), err)
				}
				if c.hits > 0 {
					b.StopTimer()
					testenv.OK(b, l.Release(b.Context()))
					b.StartTimer()
				}
			}
		})
	}
}
