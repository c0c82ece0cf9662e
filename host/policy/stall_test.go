package policy

import (
	"errors"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi"
)

// chaser is a guest that does nothing in its calls but wait for memory: each load's address follows from the load before,
// anywhere in 60 MiB that were written before.
func chaser() assembly {
	const bytes = 60 << 20
	const get, set, tee = 0x20, 0x21, 0x22
	next := bodyOf([]byte{get, 0}, i32(1664525), []byte{0x6c}, i32(1013904223), []byte{0x6a, tee, 0}, // n = n * a + b
		i32(6), []byte{0x76}, i32(bytes-4), []byte{0x71, 0x28, 2, 0}, // load((n >> 6) & mask)
		[]byte{get, 0, 0x6a, set, 0}) // n += what was there
	a := minimal(abi.RoleEvict).
		with(abi.ExportInitialize, ">", i32(128<<10), i32(0), i32(bytes-128<<10), []byte{0xfc, 11, 0}).
		with(abi.ExportStep, "ii>I", loopOf(next), i64(0))
	a.pages = 1000
	return a
}

// The longest that a call can hold its root up, within the fuel that a module gets without the operator's word: by
// calculating, by recursing, and by waiting for memory. Nothing can interrupt it.
func BenchmarkLongestStall(b *testing.B) {
	worst := map[string]assembly{"misses": chaser(), "loop": minimal(abi.RoleEvict).with(abi.ExportStep, "ii>I", loopOf(), i64(0))}
	for name, a := range worst {
		m, err := openBytes(b, a.bytes(), Options{})
		if err != nil {
			b.Fatal(err)
		}
		b.Run(name, func(b *testing.B) {
			var best, most time.Duration
			var fuel uint64
			for b.Loop() {
				e := newEvict(b, m, 10)
				before := e.Stats().Fuel
				start := time.Now()
				if _, err := e.Victims(abi.Ask{Bytes: 1, MaxVictims: 1, Tenant: abi.None}, make([]uint32, 1)); !errors.Is(err, ErrFuel) {
					b.Fatal(err)
				}
				took := time.Since(start)
				if best == 0 || took < best {
					best = took
				}
				most, fuel = max(most, took), e.Stats().Fuel-before
			}
			b.ReportMetric(float64(best.Microseconds())/1000, "best-ms")
			b.ReportMetric(float64(most.Microseconds())/1000, "worst-ms")
			b.ReportMetric(float64(fuel), "fuel")
		})
	}
}
