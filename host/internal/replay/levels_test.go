package replay_test

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/replay"
)

// With a queue and two levels what waits comes nearer: prefetched chunks are loaded from memory, and the report tells
// what came from each level.
func TestPrefetch(t *testing.T) {
	requests := mixture(t, 150)
	shape := replay.Shape{Ranks: 1, ChunkBytes: 16 << 10, PageBytes: 4 << 10}
	entry := entryBytes(t, shape)
	socket, _ := start(t, filepath.Join(t.TempDir(), "far"), 2000*entry, func(c *config.Config) {
		c.Roots[0].Level = 1
		c.Roots = append([]config.Root{{Path: "memory:", Capacity: 100 * entry}}, c.Roots...)
	})
	r := play(t, replay.Options{Trace: write(t, requests), Socket: socket, Shape: shape, Sessions: 2, Prefetch: 4})
	if len(r.Levels) != 2 || r.Levels[0].BytesLoaded == 0 || r.Levels[1].Prefetched != 0 {
		t.Fatalf("the levels of the report are %+v", r.Levels)
	}
	near := r.Levels[0]
	if near.Prefetched == 0 || near.PrefetchesUsed == 0 || near.PrefetchesUsed+near.PrefetchesWasted > near.Prefetched {
		t.Errorf("the nearest level prefetched %+v", near)
	}
	var table strings.Builder
	if err := r.Table(&table); err != nil || !strings.Contains(table.String(), "used") {
		t.Error(err, table.String())
	}
}
