package store

import (
	"errors"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/kv"
)

// BenchmarkLookupWithShadows is a lookup of 1,000 resident chunks, and its release, with so many policies listening.
func BenchmarkLookupWithShadows(b *testing.B) {
	const entries, chain = 1 << 18, 1000
	f := indexOnly(b, entries, 32)
	f.fill(entries, 32)
	var lists [64][]kv.Key
	for i := range lists {
		for n := range uint64(chain) {
			lists[i] = append(lists[i], hashKey(uint64(i)*chain+n, 32))
		}
	}
	for _, shadows := range []string{"none", "one", "two"} {
		b.Run(shadows, func(b *testing.B) {
			if shadows != "none" {
				// there from the run before
				if err := f.store.addShadow(b.Context(),
					Shadow{Policy: policy.NewHandle(policy.Builtin(abi.RoleEvict), shadows, nil, nil)}); err != nil &&
					!errors.Is(err, ErrConfig) {
					b.Fatal(err)
				}
			}
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				l, err := f.store.Lookup(LookupRequest{Namespace: f.space, Keys: lists[i%len(lists)]})
				if err != nil || l.Hits() != chain {
					b.Fatal(l.Hits(), err)
				}
				l.Release()
				i++
			}
			dropped := uint64(0)
			for _, s := range f.store.Stats().Shadows {
				dropped += s.Dropped
			}
			b.ReportMetric(float64(dropped)/float64(b.N), "dropped/op")
		})
	}
}
