package store

import "testing"

// TestReadsAreMeasured: the speed of memory is told at the start, that of a directory once it has some pieces.
func TestReadsAreMeasured(t *testing.T) {
	f := twoLevels(t, 64, 64, func(c *Config) {
		c.Roots[0].Traits, c.Roots[0].Write = Memory, WriteThrough
	})
	near, far := f.store.roots[0], f.store.roots[1]
	told := map[string]chan float64{near.Path: make(chan float64, 1), far.Path: make(chan float64, 1)}
	f.store.MeasureReads(func(root string, perSecond float64, _ bool) { told[root] <- perSecond })
	if got := <-told[near.Path]; got <= 0 {
		t.Errorf("memory is read at %.0f bytes per second, want more", got)
	}
	if got := far.readSpeed(t.Context()); got != 0 {
		t.Errorf("an empty root is read at %.0f bytes per second, want 0", got)
	}
	f.mustPut(upTo(20)...)
	f.settle()
	equal(t, "files that are read", len(far.somePieces(speedReaders)), speedReaders)
	if got := <-told[far.Path]; got <= 0 {
		t.Errorf("a root with pieces is read at %.0f bytes per second, want more", got)
	}
}
