package store

import "testing"

// TestReadsAreMeasured: the speed of a directory with pieces of an earlier life is told, and nothing of an empty one.
func TestReadsAreMeasured(t *testing.T) {
	f := twoLevels(t, 64, 64, func(c *Config) {
		c.Roots[0].Traits, c.Roots[0].Write = Memory, WriteThrough
	})
	far := f.store.roots[1]
	if got := far.readSpeed(t.Context()); got != 0 {
		t.Errorf("an empty root is read at %.0f bytes per second, want 0", got)
	}
	f.mustPut(upTo(20)...)
	f.settle()
	equal(t, "files that are read", len(far.somePieces(speedReaders)), speedReaders)
	if got := far.readSpeed(t.Context()); got <= 0 {
		t.Errorf("a root with pieces is read at %.0f bytes per second, want more", got)
	}
	speeds := make(chan string, 2)
	f.store.MeasureReads(func(root string, perSecond float64) { speeds <- root })
	equal(t, "root that is told", <-speeds, far.Path)
}
