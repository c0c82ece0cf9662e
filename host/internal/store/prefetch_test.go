package store

import (
	"bytes"
	"context"
	"sync"
	"testing"
	"time"

	"github.com/kvhost/kvhost/host/internal/store/moves"
)

// gate is a move that keeps the only worker until it is opened.
type gate chan struct{}

func (g gate) Bytes() int64                            { return 0 }
func (g gate) Run(context.Context, *moves.Copier) bool { <-g; return false }
func (g gate) Shed()                                   {}
func (g gate) Yields() bool                            { return false }
func (g gate) Leaves() bool                            { return false }
func (g gate) Cancelled() bool                         { return false }

// farAway is a store of one prefix of 64 chunks, of which all but the last 16 are in the far level only. Its mover has
// one worker, and so many entries may wait for it.
func farAway(t *testing.T, waiting int) *fixture {
	t.Helper()
	f := twoLevels(t, 16, 256, func(c *Config) {
		c.UpkeepEvery = time.Hour
		c.Moves.Workers, c.Moves.Waiting = 1, int64(waiting)*pieceBytes
	})
	for n := range uint64(64) {
		f.mustPut(n)
		f.settle()
	}
	return f
}

// shut keeps moves from being run until the gate is opened.
func (f *fixture) shut() (open func()) {
	f.Helper()
	g := make(gate)
	open = sync.OnceFunc(func() { close(g) })
	f.Cleanup(open)
	if !f.store.mover.Offer(g) {
		f.Fatal("the mover takes nothing")
	}
	return open
}

// prefetch looks keys up and asks for them.
func (f *fixture) prefetch(n ...uint64) *Lease {
	f.Helper()
	l, err := f.store.Lookup(LookupRequest{Namespace: f.space, Keys: keys(n...), Prefetch: true})
	must(f, err)
	equal(f, "hits", l.Hits(), len(n))
	return l
}

// levelOf is the level of the nearest copy that a lease has of a key.
func (f *fixture) levelOf(l *Lease, i int) int { return f.cfg.Roots[l.granted(i).Root].Level }

// openIn opens a lease's key as a load does, and compares the level.
func (f *fixture) openIn(l *Lease, i, level int) {
	f.Helper()
	l.Approach(i)
	p, err := l.Open(i, 0)
	must(f, err)
	equal(f, "root of a piece", p.Root(), f.cfg.Roots[level].Path)
	p.Close()
}

// TestLoadBeforeItsPrefetch: a load takes what is there at once, and never waits for a copy. What it has loaded from
// farther away is not copied for it any more; the other is, and is loaded from near.
func TestLoadBeforeItsPrefetch(t *testing.T) {
	f := farAway(t, 64)
	open := f.shut()
	l := f.prefetch(0, 1)
	f.openIn(l, 0, 1)
	open()
	f.settle()
	p := f.moved(0, moves.Prefetch)
	equal(t, "copies that were made", p.Done.Load(), 1)
	equal(t, "copies that were cancelled", p.Cancelled.Load(), 1)
	f.openIn(l, 0, 1)
	equal(t, "level of the copy", f.levelOf(l, 1), 0)
	f.openIn(l, 1, 0)
	f.openIn(l, 1, 0)
	l.Release()
	f.settle()
	levels := f.store.Stats().Levels
	equal(t, "prefetches used", levels[0].PrefetchesUsed, 1)
	equal(t, "prefetches wasted", levels[0].PrefetchesWasted, 0)
	f.checkUsed()
}

// TestPrefetchEndsWithItsLease: what waits is cancelled when the lease ends, and a copy that nobody has loaded when it
// goes counts as wasted.
func TestPrefetchEndsWithItsLease(t *testing.T) {
	f := farAway(t, 64)
	open := f.shut()
	l := f.prefetch(0, 1, 2)
	n, _ := f.store.mover.InFlight()
	equal(t, "moves in flight", n, 4)
	l.Release()
	n, waiting := f.store.mover.InFlight()
	equal(t, "moves in flight without the lease", n, 1)
	equal(t, "bytes that wait", waiting, 0)
	open()
	f.settle()
	p := f.moved(0, moves.Prefetch)
	equal(t, "copies that were cancelled", p.Cancelled.Load(), 3)
	equal(t, "copies that were made", p.Done.Load(), 0)
	equal(t, "root of an entry", f.rootOf(0), 1)

	l = f.prefetch(3)
	f.settle()
	equal(t, "level of the copy", f.levelOf(l, 0), 0)
	l.Release()
	for n := uint64(100); n < 140; n++ {
		must(t, f.putUnder(n, n, 0))
		f.settle()
	}
	equal(t, "root of what nobody has loaded", f.rootOf(3), 1)
	equal(t, "prefetches wasted", f.store.Stats().Levels[0].PrefetchesWasted, 1)
	f.checkUsed()
}

// TestPrefetchOfAnother: a copy that came for one lease is loaded by every other one.
func TestPrefetchOfAnother(t *testing.T) {
	f := farAway(t, 64)
	plain := f.lookup(0)
	l := f.prefetch(0)
	f.settle()
	f.openIn(plain, 0, 0)
	plain.Release()
	l.Release()
	equal(t, "prefetches used", f.store.Stats().Levels[0].PrefetchesUsed, 1)
	f.settle()
	f.checkUsed()
}

// TestPrefetchForTwo: the copy that one lease asked for is not pinned for another that asked for it, too. When the first one
// ends, and its copy with it or evicted, the second one still has what it was promised, from where that was found.
func TestPrefetchForTwo(t *testing.T) {
	f := farAway(t, 64)
	open := f.shut()
	first, second := f.prefetch(0, 1), f.prefetch(0, 1)
	f.openIn(first, 0, 1) // which ends the copy of key 0
	open()
	f.settle()
	equal(t, "copies that were made", f.moved(0, moves.Prefetch).Done.Load(), 1)
	equal(t, "level of the copy", f.levelOf(first, 1), 0)
	first.Release()
	for n := uint64(100); n < 132; n++ { // the near level is full of others
		f.mustPut(n)
		f.settle()
	}
	for i := range 2 {
		data, err := read(second, i, 0)
		if err != nil || !bytes.Equal(data, payload(f.space.Plan(0), testKey(uint64(i)), 0)) {
			t.Errorf("key %d: %v", i, err)
		}
		equal(t, "level", f.levelOf(second, i), 1)
	}
	second.Release()
	f.settle() // it has loaded, so that copies were offered
	f.checkUsed()
}

// TestPrefetchIsShed: beyond the bytes that may wait prefetches are shed, and those that wait make room for a demotion.
func TestPrefetchIsShed(t *testing.T) {
	f := farAway(t, 2)
	open := f.shut()
	l := f.prefetch(0, 1, 2, 3)
	p := f.moved(0, moves.Prefetch)
	equal(t, "prefetches that were shed", p.Shed.Load(), 2)
	r, last := f.root(), f.lookup(63)
	r.Lock()
	m := r.Moves.Copy(last.grants[0].Slot)
	r.Unlock()
	last.Release()
	if !(&moves.Entry{Move: m, Kind: moves.Demotion, From: &r.origin, To: f.store.levels[1]}).Offer(f.store.mover) {
		t.Error("a demotion was shed while a prefetch waits")
	}
	equal(t, "prefetches that were shed", p.Shed.Load(), 3)
	f.openIn(l, 3, 1)
	open()
	f.settle()
	equal(t, "copies that were made", p.Done.Load(), 1)
	equal(t, "level of the first", f.levelOf(l, 0), 0)
	l.Release()
	f.settle()
}

// TestPrefetchThatCannotBe: where the near level is out of service a load is served from the far one.
func TestPrefetchThatCannotBe(t *testing.T) {
	f := farAway(t, 64)
	f.takeOut(0)
	l := f.prefetch(0, 1)
	f.settle()
	p := f.moved(0, moves.Prefetch)
	equal(t, "copies that failed", p.Failed.Load(), 2)
	f.openIn(l, 0, 1)
	l.Release()
	f.settle()

	f = farAway(t, 64)
	l = f.prefetch(0)
	f.settle()
	equal(t, "level of the copy", f.levelOf(l, 0), 0)
	f.takeOut(0)
	if p, err := l.Open(0, 0); err != nil { // a file of its own can still be read
		t.Error(err)
	} else {
		p.Close()
	}
	l.Release()
}
