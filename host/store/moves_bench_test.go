package store

import (
	"context"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvhost/kvhost/host/store/entries"
	"github.com/kvhost/kvhost/host/store/moves"
)

// BenchmarkLoadsBesideMoves loads entries of the near level, in turns with the mover idle and with copies to the far level
// at full budget, and reports both 99th percentiles and their ratio.
func BenchmarkLoadsBesideMoves(b *testing.B) {
	const near, turn = 256, 200
	f := newFixture(b, b.TempDir(), near, 1, func(c *Config) {
		c.Roots = append(c.Roots, RootConfig{Path: b.TempDir(), Capacity: 64 * pieceBytes, MaxEntries: 1024, Level: 1})
		c.Moves.Bandwidth, c.Now = 512<<20, time.Now // the default of move.bandwidth
	})
	for n := range uint64(near - 32) {
		f.mustPut(n)
	}
	f.settle()
	var on atomic.Bool
	ctx, cancel := context.WithCancel(b.Context())
	done := make(chan struct{})
	go func() { // the far level has room for a quarter of them: it never has the one that is next
		defer close(done)
		from, to := f.store.roots[0], f.store.levels[1]
		for slot := uint32(0); ctx.Err() == nil; slot = (slot + 1) % (near - 32) {
			var m *entries.Move
			if from.Lock(); on.Load() {
				m = from.Moves.Copy(slot)
			}
			from.Unlock()
			if m != nil {
				(&moves.Entry{Move: m, Kind: moves.Through, From: &from.origin, To: to}).Offer(f.store.mover)
			}
			if m == nil {
				time.Sleep(time.Millisecond) // not to take a core from what is measured
			}
			_ = f.store.mover.Wait(ctx, 16*pieceBytes)
		}
	}()
	var took [2][]time.Duration
	for i := 0; b.Loop(); i++ {
		side := i / turn % 2
		if i%turn == 0 {
			on.Store(side == 1)
			if side == 0 {
				f.settle()
			}
		}
		start := time.Now()
		f.mustRead(uint64(i*7) % (near - 64))
		took[side] = append(took[side], time.Since(start))
	}
	cancel()
	<-done
	copies := f.moved(1, moves.Through).Done.Load()
	var p99 [2]time.Duration
	for side, list := range took {
		if len(list) > 0 {
			slices.Sort(list)
			p99[side] = list[len(list)*99/100]
		}
	}
	b.ReportMetric(float64(p99[0].Microseconds()), "p99-idle-us")
	b.ReportMetric(float64(p99[1].Microseconds()), "p99-moves-us")
	b.ReportMetric(float64(p99[1])/float64(max(1, p99[0])), "ratio")
	b.ReportMetric(float64(copies), "copies")
}
