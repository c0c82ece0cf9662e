package transfer_test

import (
	"path/filepath"
	"slices"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
	"github.com/kvhost/kvhost/host/internal/transfer"
	"github.com/kvhost/kvhost/host/kv"
)

// TestHungRootLeavesWorkers hangs one of two roots, without a limit of time, under more loads than there are
// workers: those from the other root are delivered meanwhile.
func TestHungRootLeavesWorkers(t *testing.T) {
	const chunks = 24
	geo := kv.Uniform(2, 2, 1, 4096)
	b := newBench(t, geo, geo.Blocks*chunks, func(c *store.Config) {
		c.IOTimeout = -1
		c.Roots = append(c.Roots, store.RootConfig{Path: filepath.Join(t.TempDir(), "other"), Capacity: 1 << 30})
	})
	b.storeChunks(chunks)
	var list []int
	for n := range chunks {
		list = append(list, n)
	}
	l := b.lease(list...)
	defer l.Release()
	var hung, well []transfer.LoadChunk
	for i, c := range b.spread(chunks) {
		c.Index = i
		if l.Root(i) == b.root {
			hung = append(hung, c)
		} else {
			well = append(well, c)
		}
	}
	if len(hung) < 5 || len(well) < 5 {
		t.Fatalf("%d and %d chunks in the two roots", len(hung), len(well))
	}
	b.fs.Set(faultfs.MustRules("read " + b.root + "/**.kv: hang")...)
	b.poison()
	stuck := make(chan transfer.Outcome, 1)
	b.queue.Load(&transfer.LoadJob{Lease: l, Memory: b.memory, Chunks: hung,
		Done: func(o transfer.Outcome) { stuck <- o }})
	if out := b.load(l, well, nil); len(out.Failed) > 0 {
		t.Errorf("load from the root that is well failed: %+v", out)
	}
	for _, c := range well {
		testenv.NoError(t, b.checkPages(c.Index, c.Blocks))
	}
	b.fs.Release()
	if out := <-stuck; len(out.Failed) > 0 {
		t.Errorf("load from the root that hung failed after its release: %+v", out)
	}
	for _, c := range slices.Concat(well, hung) {
		testenv.NoError(t, b.checkPages(c.Index, c.Blocks))
	}
}
