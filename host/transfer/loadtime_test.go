package transfer_test

import (
	"testing"
	"time"

	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/transfer"
	"github.com/kvhost/kvhost/staging/faultfs"
)

// LoadTime is unknown before the first load, grows with the load and with what is queued before it, and is near the truth.
func TestLoadTime(t *testing.T) {
	geo := chunk.Uniform(2, 2, 1, 4096)
	b := newBench(t, geo, geo.Blocks*8)
	b.storeChunks(8)
	all := []int{0, 1, 2, 3, 4, 5, 6, 7}
	l := b.lease(all...)
	defer l.Release()
	if got := b.queue.LoadTime(l, len(all), geo.PageBytes()); got != 0 {
		t.Errorf("%v before anything was loaded", got)
	}
	b.fs.Set(faultfs.MustRules("read **: delay 20ms")...)
	start := time.Now()
	if out := b.load(l, b.spread(8), nil); len(out.Failed) > 0 {
		t.Fatalf("%+v", out)
	}
	took := time.Since(start)
	one := b.lease(0)
	defer one.Release()
	short, long := b.queue.LoadTime(one, 1, geo.PageBytes()), b.queue.LoadTime(l, len(all), geo.PageBytes())
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
	if behind := b.queue.LoadTime(one, 1, geo.PageBytes()); behind < 4*short {
		t.Errorf("%v behind a queue, %v without", behind, short)
	}
	b.fs.Release()
	<-done
}
