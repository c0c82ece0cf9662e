package store

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kvhost/kvhost/staging"
)

// BenchmarkPublications has 1 and 8 writers store pieces of one page of payload, beside a bare loop that creates,
// writes and renames files of the same size, and syncs them where the durability wants it. Passes take turns; ratios
// are bare time by ours, medians of pairs with the quartiles.
func BenchmarkPublications(b *testing.B) {
	const passes, each = 15, 400
	for _, strict := range []bool{false, true} {
		for _, writers := range []int{1, 8} {
			b.Run(fmt.Sprintf("strict=%t/writers=%d", strict, writers), func(b *testing.B) {
				for range b.N {
					var ratios, ours, cpu []float64
					n := each
					if strict {
						n = each / 10
					}
					for pass := range passes {
						bare := func() spent { return barePublications(b, writers, n, strict) }
						full := func() spent { return publications(b, writers, n, strict) }
						var t, u spent
						if pass%2 == 0 {
							t, u = bare(), full()
						} else {
							u, t = full(), bare()
						}
						ratios = append(ratios, float64(t.time)/float64(u.time))
						cpu = append(cpu, float64(t.cpu)/float64(u.cpu))
						ours = append(ours, float64(n)/u.time.Seconds())
					}
					slices.Sort(ratios)
					slices.Sort(ours)
					slices.Sort(cpu)
					b.ReportMetric(ratios[passes/2], "bare/ours")
					b.ReportMetric(ratios[passes/4], "q1")
					b.ReportMetric(ratios[passes*3/4], "q3")
					b.ReportMetric(cpu[passes/2], "cpu-bare/ours")
					b.ReportMetric(ours[passes/2], "pieces/s")
				}
			})
		}
	}
}

type spent struct{ time, cpu time.Duration }

// share lets each of some writers do its part of n, and says what that takes.
func share(writers, n int, do func(writer, i int)) spent {
	var all sync.WaitGroup
	start, cpu := time.Now(), cpuTime()
	for w := range writers {
		all.Go(func() {
			for i := w; i < n; i += writers {
				do(w, i)
			}
		})
	}
	all.Wait()
	return spent{time.Since(start), cpuTime() - cpu}
}

func publications(b *testing.B, writers, n int, strict bool) spent {
	f := newFixture(b, b.TempDir(), n+8, 1, func(c *Config) { c.Strict = strict })
	defer f.store.Close()
	pools := make([]*staging.Slots, writers)
	for i := range pools {
		var err error
		if pools[i], err = staging.NewSlots(1, pieceBytes); err != nil {
			b.Fatal(err)
		}
		defer pools[i].Close()
	}
	return share(writers, n, func(w, i int) {
		p, err := f.store.Put(context.Background(), f.request(uint64(i), uint64(i), 0))
		if err == nil {
			if err = writePage(p, pools[w]); err == nil {
				err = p.Publish(context.Background())
			}
		}
		if err != nil {
			b.Error(err)
		}
	})
}

// writePage writes a piece that says little: what it costs to make a payload and its checksums is not measured here.
func writePage(p *Put, pool *staging.Slots) error {
	slot, err := pool.Acquire(context.Background())
	if err != nil {
		return err
	}
	defer slot.Release()
	image := slot.Bytes()[:p.FileBytes()]
	p.Head(image, make([]uint64, len(p.Plan().Extents())))
	file, err := p.File()
	if err == nil {
		_, err = file.WriteAt(image, 0)
	}
	return err
}

func barePublications(b *testing.B, writers, n int, durable bool) spent {
	dir := b.TempDir()
	page := make([]byte, pieceBytes)
	return share(writers, n, func(_, i int) {
		temp, name := filepath.Join(dir, fmt.Sprintf(".%d.tmp", i)), filepath.Join(dir, fmt.Sprint(i))
		file, err := os.Create(temp)
		if err == nil {
			if _, err = file.Write(page); err == nil && durable {
				err = file.Sync()
			}
			file.Close()
		}
		if err == nil {
			err = os.Rename(temp, name)
		}
		if err == nil && durable {
			err = staging.OS().SyncDir(dir)
		}
		if err != nil {
			b.Error(err)
		}
	})
}
