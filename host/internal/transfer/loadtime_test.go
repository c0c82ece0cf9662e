package transfer_test

import (
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
	"github.com/kvhost/kvhost/host/internal/transfer"
	"github.com/kvhost/kvhost/host/kv"
)

// LoadTime is unknown before the first load, grows with the load and with what is queued before it, and is near the truth.
// In a bubble only the delays take time.
func TestLoadTime(t *testing.T) { synctest.Test(t, loadTime) }

func loadTime(t *testing.T) {
	geo := kv.Uniform(2, 2, 1, 4096)
	b := newBench(t, geo, geo.Blocks*8)
	b.storeChunks(8)
	all := []int{0, 1, 2, 3, 4, 5, 6, 7}
	l := b.lease(all...)
	defer l.Release()
	if got, _ := b.queue.LoadTime(l, len(all), geo.PageBytes(), nil); got != 0 {
		t.Errorf("%v before anything was loaded", got)
	}
	b.fs.Set(faultfs.MustRules("read **: delay 20ms")...)
	start := time.Now()
	if out := b.load(l, b.spread(8), nil); len(out.Failed) > 0 {
		t.Fatalf("slow load failed: %+v", out)
	}
	took := time.Since(start)
	one := b.lease(0)
	defer one.Release()
	short, _ := b.queue.LoadTime(one, 1, geo.PageBytes(), nil)
	long, parts := b.queue.LoadTime(l, len(all), geo.PageBytes(), nil)
	if len(parts) != 0 {
		t.Errorf("parts %v of one root", parts)
	}
	if short <= 0 || long < 4*short || long > 2*took || long < took/4 {
		t.Errorf("one chunk %v, all %v; loading all took %v", short, long, took)
	}
	b.fs.Set(faultfs.MustRules("read **: hang")...)
	done := make(chan transfer.Outcome, 1)
	b.queue.Load(&transfer.LoadJob{
		Lease: l, Memory: b.memory, Chunks: b.spread(8), Done: func(o transfer.Outcome) { done <- o },
	})
	if err := b.fs.AwaitHanging(t.Context(), 4); err != nil { // as many as there are workers; four more are queued
		t.Fatal(err)
	}
	if behind, _ := b.queue.LoadTime(one, 1, geo.PageBytes(), nil); behind < 4*short {
		t.Errorf("%v behind a queue, %v without", behind, short)
	}
	b.fs.Release()
	<-done
}

// A hit in two roots has parts, which end where the root changes and take no longer than what follows them.
func TestLoadTimeParts(t *testing.T) {
	geo := kv.Uniform(2, 2, 1, 4096)
	b := newBench(t, geo, geo.Blocks*32, func(c *store.Config) {
		c.Roots = append(c.Roots, store.RootConfig{Path: filepath.Join(t.TempDir(), "other"), Capacity: 1 << 30})
	})
	b.storeChunks(32)
	all := make([]int, 32)
	for i := range all {
		all[i] = i
	}
	measure := b.lease(all...)
	if out := b.load(measure, b.spread(32), nil); len(out.Failed) > 0 {
		t.Fatalf("measured load failed: %+v", out)
	}
	l := b.lease(all...)
	defer l.Release()
	whole, parts := b.queue.LoadTime(l, len(all), geo.PageBytes(), nil)
	if len(parts) == 0 {
		t.Fatal("all chunks went to one root")
	}
	last := transfer.LoadPart{}
	for _, part := range append(parts, transfer.LoadPart{Keys: len(all), Time: whole}) {
		if part.Keys <= last.Keys || part.Time < last.Time {
			t.Errorf("part %+v after %+v", part, last)
		}
		if part.Keys < len(all) && l.Root(part.Keys-1) == l.Root(part.Keys) {
			t.Errorf("part %+v ends within a root", part)
		}
		last = part
	}
}
