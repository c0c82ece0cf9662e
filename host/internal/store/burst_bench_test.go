package store

import (
	"testing"
	"time"
)

// BenchmarkBurst has 16 writers store 400 entries at once into a full root of 40 with background eviction, with and
// without waiting for the evictor: how many stores are shed, and how long it takes.
func BenchmarkBurst(b *testing.B) {
	for _, c := range []struct {
		name     string
		patience time.Duration
	}{{"no-wait", 1}, {"wait", 0}} {
		b.Run(c.name, func(b *testing.B) {
			var shed, waits int64
			for b.Loop() {
				f := newFixture(b, b.TempDir(), 40, 1, background(0.95, 0.9), func(cfg *Config) { cfg.EvictPatience = c.patience })
				shed += f.burst(0, 16, 25)
				waits += int64(f.store.Stats().Roots[0].Waits)
				f.store.Close()
			}
			b.ReportMetric(float64(shed)/float64(b.N)/4, "shed-%")
			b.ReportMetric(float64(waits)/float64(b.N), "waits")
		})
	}
}
