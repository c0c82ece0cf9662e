package transfer_test

import (
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
	"github.com/kvhost/kvhost/host/internal/transfer"
	"github.com/kvhost/kvhost/host/kv"
)

// Time is busy while a piece is on its way, however many are.
func TestBusyIsWhileAnythingMoves(t *testing.T) {
	geo := kv.Uniform(2, 1, 1, 4096)
	b := newBench(t, geo, geo.Blocks*2)
	b.storeChunks(2)
	b.fs.Set(faultfs.MustRules("read *: hang")...)
	l := b.lease(0, 1)
	defer l.Release()
	done := make(chan transfer.Outcome, 1)
	h := b.queue.Load(&transfer.LoadJob{Lease: l, Memory: b.memory, Chunks: b.spread(2),
		Done: func(o transfer.Outcome) { done <- o }})
	testenv.OK(t, b.fs.AwaitHanging(testenv.Context(t), 2))
	first := b.engine.Traffic()[0]
	testenv.Until(t, "time in which the route works", func() bool { return first.Busy != b.engine.Traffic()[0].Busy })
	if first.InFlight != 2 || len(first.Routes) != 1 || first.Routes[0].InFlight != 2 || first.Routes[0].Busy <= 0 {
		t.Errorf("traffic in flight: got %+v, want 2 files on one route", first)
	}
	h.Cancel()
	<-done
	b.fs.Release()
	b.fs.Set()
	testenv.OK(t, b.engine.Close())
	if now := b.engine.Traffic()[0]; now.InFlight != 0 || len(now.Routes) != 0 {
		t.Errorf("what was cancelled is counted: %+v", now)
	}
}

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
	if got := b.queue.LoadTime(l.Places(nil), geo.PageBytes()); got != 0 {
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
	short := b.queue.LoadTime(one.Places(nil), geo.PageBytes())
	long := b.queue.LoadTime(l.Places(nil), geo.PageBytes())
	l.Leads(nil, func(keys int, places []store.Place) { t.Errorf("%d keys lead to another root, of %v", keys, places) })
	if short <= 0 || long < 4*short || long > 2*took || long < took/4 {
		t.Errorf("one chunk %v, all %v; loading all took %v", short, long, took)
	}
	b.fs.Set(faultfs.MustRules("read **: hang")...)
	done := make(chan transfer.Outcome, 1)
	b.queue.Load(&transfer.LoadJob{
		Lease: l, Memory: b.memory, Chunks: b.spread(8), Done: func(o transfer.Outcome) { done <- o },
	})
	if err := b.fs.AwaitHanging(testenv.Context(t), 4); err != nil { // as many as there are workers; four more are queued
		t.Fatal(err)
	}
	if behind := b.queue.LoadTime(one.Places(nil), geo.PageBytes()); behind < 4*short {
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
	type part struct {
		Keys int
		Time time.Duration
	}
	var parts []part
	l.Leads(nil, func(keys int, places []store.Place) {
		parts = append(parts, part{keys, b.queue.LoadTime(places, geo.PageBytes())})
	})
	if len(parts) == 0 {
		t.Fatal("all chunks went to one root")
	}
	last := part{}
	for _, part := range append(parts, part{len(all), b.queue.LoadTime(l.Places(nil), geo.PageBytes())}) {
		if part.Keys <= last.Keys || part.Time < last.Time {
			t.Errorf("part %+v after %+v", part, last)
		}
		if part.Keys < len(all) && l.Root(part.Keys-1) == l.Root(part.Keys) {
			t.Errorf("part %+v ends within a root", part)
		}
		last = part
	}
}
