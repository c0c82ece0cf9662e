package store

import (
	"testing"

	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/plugins/fanout"
)

// BenchmarkOpen opens a piece and closes it, and puts a piece that replaces another: under the built-in name, and one that
// a policy in wasm has given.
func BenchmarkOpen(b *testing.B) {
	for _, by := range []string{"built-in", "policy"} {
		named := func(c *Config) {
			if by == "policy" {
				c.Policies.Place = use(b, "fanout", nil, policy.Config{fanout.ConfigWidths: "1/1/1"})
			}
		}
		b.Run("open/"+by, func(b *testing.B) {
			const keys = 64
			f := newFixture(b, b.TempDir(), 2*keys, 1, named)
			f.mustPut(upTo(keys)...)
			leases := make([]*Lease, keys)
			for n := range leases {
				leases[n] = f.lookup(uint64(n))
				defer leases[n].Release()
			}
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				p, err := leases[i%keys].Open(0, 0)
				must(b, err)
				p.Close()
			}
		})
		b.Run("put/"+by, func(b *testing.B) {
			f := newFixture(b, b.TempDir(), 16, 1, named)
			b.ReportAllocs()
			for n := uint64(0); b.Loop(); n++ {
				p, err := f.store.Put(b.Context(), f.request(n, n, 0))
				must(b, err)
				must(b, write(p))
				must(b, p.Publish(b.Context()))
			}
		})
	}
}
