package transfer_test

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/kv"
)

// The store and load path of BenchmarkPath under each setting beside the plainest one: no limit for operations, nothing
// synced. Passes take turns, each round in another order; the first round is not counted.
// Reported are medians of GB/s, and of the ratios plainest time / time, with the quartiles: 1.0 costs nothing.
func BenchmarkSettings(b *testing.B) {
	settings := []struct {
		name   string
		change func(*store.Config)
	}{
		{"plainest", func(*store.Config) {}},
		{"io_timeout", func(c *store.Config) { c.IOTimeout = time.Minute }},
		{"strict", func(c *store.Config) { c.Strict = true }},
	}
	geo := kv.Uniform(1, 32, 1, 64<<10)
	for _, where := range []struct{ name, dir string }{{"disk", os.TempDir()}, {"tmpfs", "/dev/shm"}} {
		b.Run(where.name, func(b *testing.B) {
			dir, err := os.MkdirTemp(where.dir, "kvhost-bench-")
			if err != nil {
				b.Fatal(err)
			}
			defer os.RemoveAll(dir)
			paths := make([]*ourPath, len(settings))
			for i, s := range settings {
				paths[i] = newOurPath(b, geo, filepath.Join(dir, s.name), func(c *store.Config) {
					c.IOTimeout = -1
					s.change(c)
				})
				defer paths[i].close()
			}
			stores, loads := make([][]float64, len(settings)), make([][]float64, len(settings))
			stored, loaded := make([][]float64, len(settings)), make([][]float64, len(settings)) // GB/s
			gb := float64(benchFiles) * float64(geo.PageBytes()) / 1e9
			for round := range benchPairs + 1 {
				took := make([]times, len(settings))
				for k := range paths {
					i := (k + round) % len(paths)
					took[i] = paths[i].pass(round)
					if err := removeFiles(paths[i].root); err != nil {
						b.Fatal(err)
					}
				}
				if round == 0 {
					continue
				}
				for i, t := range took {
					stores[i] = append(stores[i], took[0].store.Seconds()/t.store.Seconds())
					loads[i] = append(loads[i], took[0].load.Seconds()/t.load.Seconds())
					stored[i], loaded[i] = append(stored[i], gb/t.store.Seconds()), append(loaded[i],
						gb/t.load.Seconds())
				}
			}
			for i, s := range settings {
				slices.Sort(stored[i])
				slices.Sort(loaded[i])
				b.ReportMetric(stored[i][benchPairs/2], s.name+"-store-GB/s")
				b.ReportMetric(loaded[i][benchPairs/2], s.name+"-load-GB/s")
			}
			for i, s := range settings[1:] {
				report(b, s.name+"-store", stores[i+1])
				report(b, s.name+"-load", loads[i+1])
			}
		})
	}
}
