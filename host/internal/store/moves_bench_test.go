package store

import (
	"bytes"
	"context"
	"io"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvhost/kvhost/host/internal/memfs"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/moves"
	"github.com/kvhost/kvhost/host/kv"
)

// BenchmarkLoadsBesideMoves loads entries of the near level, in memory and on a disk, in turns with the mover idle and with
// copies to the far level at full budget. It reports percentiles of both, the ratio of the 99th ones, and what was copied in
// a second meanwhile.
func BenchmarkLoadsBesideMoves(b *testing.B) {
	b.Run("memory", func(b *testing.B) {
		loadsBesideMoves(b, func(c *Config) {
			memory, err := memfs.New(16<<20, nil)
			if err != nil {
				b.Fatal(err)
			}
			b.Cleanup(func() { memory.Close() })
			memory.Start(nil)
			c.Roots[0].FS, c.Roots[0].Path, c.Roots[0].Volatile = memory, "memory:", true
		})
	})
	b.Run("disk", func(b *testing.B) { loadsBesideMoves(b, func(*Config) {}) })
}

func loadsBesideMoves(b *testing.B, near func(*Config)) {
	const room, turn, loaded = 256, 200, 256 - 64
	f := newFixture(b, b.TempDir(), room, 1, near, func(c *Config) {
		c.Roots = append(c.Roots, RootConfig{Path: b.TempDir(), Capacity: 64 * pieceBytes, MaxEntries: 1024, Level: 1})
		c.Moves.Bandwidth, c.Now = 512<<20, time.Now // the default of move.bandwidth
	})
	var want [loaded][]byte
	for n := range uint64(room - 32) {
		f.mustPut(n)
		if n < loaded {
			want[n] = payload(f.space.Plan(0), testKey(n), 0)
		}
	}
	f.settle()
	var on atomic.Bool
	ctx, cancel := context.WithCancel(b.Context())
	done := make(chan struct{})
	go func() { // the far level has room for a quarter of them: it never has the one that is next
		defer close(done)
		from, to := f.root(), f.store.levels[1]
		for slot := uint32(0); ctx.Err() == nil; slot = (slot + 1) % (room - 32) {
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
	var beside time.Duration // spent with moves on
	var begun time.Time
	buf := make([]byte, pieceBytes)
	for i := 0; b.Loop(); i++ {
		side := i / turn % 2
		if i%turn == 0 {
			if side == 0 && i > 0 {
				beside += time.Since(begun)
			}
			on.Store(side == 1)
			if side == 0 {
				f.settle()
			}
			begun = time.Now()
		}
		n := uint64(i*7) % loaded
		start := time.Now()
		data, err := loadOne(f, n, buf)
		took[side] = append(took[side], time.Since(start))
		if err != nil || !bytes.Equal(data, want[n]) {
			b.Fatalf("key %d: %v", n, err)
		}
	}
	if on.Load() {
		beside += time.Since(begun)
	}
	cancel()
	<-done
	for side, name := range []string{"idle", "moves"} {
		slices.Sort(took[side])
		b.ReportMetric(percentile(took[side], 50), "p50-"+name+"-us")
		b.ReportMetric(percentile(took[side], 99), "p99-"+name+"-us")
	}
	b.ReportMetric(percentile(took[1], 99)/max(1e-3, percentile(took[0], 99)), "ratio")
	b.ReportMetric(float64(f.moved(1, moves.Through).Bytes.Load())/(1<<20)/max(1e-9, beside.Seconds()), "moved-MiB/s")
}

// percentile is in microseconds.
func percentile(sorted []time.Duration, percent int) float64 {
	if len(sorted) == 0 {
		return 0
	}
	return float64(sorted[len(sorted)*percent/100].Nanoseconds()) / 1e3
}

// loadOne looks an entry up, and reads and verifies its piece as a load does.
func loadOne(f *fixture, n uint64, buf []byte) ([]byte, error) {
	l := f.lookup(n)
	defer l.Release()
	p, err := l.Open(0, 0)
	if err != nil {
		return nil, err
	}
	defer p.Close()
	if _, err := p.File().ReadAt(buf, 0); err != nil && err != io.EOF {
		return nil, err
	}
	h, err := p.Verify(buf)
	if err != nil {
		return nil, err
	}
	data := buf[h.DataOffset:]
	return data, kv.VerifyExtents(h.Plan, 0, len(h.Table), data, 0, h.Table)
}
