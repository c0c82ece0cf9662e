package replay_test

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/replay"
)

// The report tells what was loaded from each level, and what was written to it.
func TestLevels(t *testing.T) {
	requests := mixture(t, 150)
	shape := replay.Shape{Ranks: 1, ChunkBytes: 16 << 10, PageBytes: 4 << 10}
	entry := entryBytes(t, shape)
	socket, _ := start(t, filepath.Join(t.TempDir(), "far"), 2000*entry, func(c *config.Config) {
		c.Roots[0].Level = 1
		c.Roots = append([]config.Root{{Path: "memory:", Capacity: 100 * entry}}, c.Roots...)
	})
	r := play(t, replay.Options{Trace: write(t, requests), Socket: socket, Shape: shape, Sessions: 2})
	if l := r.Levels; len(l) != 2 || l[0].BytesLoaded == 0 || l[0].Written == 0 || l[1].Written == 0 {
		t.Errorf("the levels of the report are %+v", l)
	}
	var table strings.Builder
	if err := r.Table(&table); err != nil || !strings.Contains(table.String(), "level 1") {
		t.Errorf("the table lacks a level (%v):\n%s", err, table.String())
	}
}
