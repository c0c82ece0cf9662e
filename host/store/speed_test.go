package store

import (
	"path/filepath"
	"testing"
	"time"
)

func TestSpeedFollowsWhatIsSeen(t *testing.T) {
	var s speed
	if s.observe(100, time.Second); s.bps.Load() != 0 {
		t.Error("a tiny transfer counts")
	}
	s.observe(1<<20, time.Second)
	if got := s.bps.Load(); got != 1<<20 {
		t.Errorf("after one transfer: %d", got)
	}
	for range 200 {
		s.observe(1<<20, time.Second/4)
	}
	if got := s.bps.Load(); got < 4<<20*9/10 || got > 4<<20 {
		t.Errorf("after many: %d, want about %d", got, 4<<20)
	}
}

// With two roots the place policy hears how fast each is.
func TestRootsSpeedsReachThePlacePolicy(t *testing.T) {
	dir := t.TempDir()
	f := newFixture(t, filepath.Join(dir, "a"), 20, 1, func(c *Config) {
		second := c.Roots[0]
		second.Path = filepath.Join(dir, "b")
		c.Roots = append(c.Roots, second)
	})
	for n := range uint64(20) {
		f.mustPut(n)
	}
	for i, r := range f.store.roots {
		if facts := r.facts(i); facts.WriteBps == 0 {
			t.Errorf("root %d: nobody measured its writes", i)
		}
	}
}
