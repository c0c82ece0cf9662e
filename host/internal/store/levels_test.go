package store

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/store/moves"
)

// twoLevels is a fixture with a root of level 0, which holds so many entries, before one of level 1, which has room.
func twoLevels(t *testing.T, near, far int, change ...func(*Config)) *fixture {
	t.Helper()
	return newFixture(t, filepath.Join(t.TempDir(), "near"), near, 1, append([]func(*Config){func(c *Config) {
		c.Roots = append(c.Roots, RootConfig{
			Path: filepath.Join(t.TempDir(), "far"), Capacity: int64(far) * pieceBytes, MaxEntries: 1024, Level: 1,
		})
	}}, change...)...)
}

// rootOf is where a key is granted: the place of its root, or -1.
func (f *fixture) rootOf(n uint64) int {
	f.Helper()
	l := f.lookup(n)
	defer l.Release()
	if !l.Has(0) {
		return -1
	}
	return int(l.grants[0].Root)
}

// TestNearestLevel: entries are stored in the nearest level and granted there, and in the next one while that is out
// of service. Of two copies the nearest is granted; DISCARD removes both, and readers of changes hear of the entry's
// beginning and end once.
func TestNearestLevel(t *testing.T) {
	f := twoLevels(t, 8, 64, func(c *Config) { c.UpkeepEvery = time.Hour })
	log := f.store.Changes()
	f.mustPut(0, 1, 2)
	for n := range uint64(3) {
		equal(t, "root of an entry", f.rootOf(n), 0)
	}
	start := log.Start()
	near := f.root()
	f.takeOut(0)
	equal(t, "state of the near root", near.Health.State() > health.Full, true)
	equal(t, "root of an entry while its root is out", f.rootOf(0), -1)
	f.mustPut(0, 3)
	equal(t, "root of an entry that was stored again", f.rootOf(0), 1)
	equal(t, "root of an entry that was stored meanwhile", f.rootOf(3), 1)
	must(t, f.store.Maintain(t.Context(), 0, Probe))
	equal(t, "the nearest of two copies", f.rootOf(0), 0)
	equal(t, "the only copy", f.rootOf(3), 1)
	if err := f.put(3, 0); err == nil {
		t.Error("an entry of the far level was stored a second time")
	}
	results, err := f.store.Discard(DiscardRequest{Namespace: f.space, Keys: keys(0, 3)})
	must(t, err)
	for i, r := range results {
		equal(t, "result of DISCARD", r, DiscardRemoved)
		equal(t, "root of a discarded entry", f.rootOf([]uint64{0, 3}[i]), -1)
	}
	gone := map[string]int{}
	changes, _, err := log.Read(start, make([]entries.Change, 0, 16))
	must(t, err)
	for _, c := range changes {
		if c.Kind == entries.Evicted {
			gone[c.Key.String()]++
		}
	}
	equal(t, "ends of an entry with two copies", gone[testKey(0).String()], 1)
	equal(t, "ends of an entry with one", gone[testKey(3).String()], 1)
	f.checkUsed()
}

// settle waits until no entry moves, and what leaves has been offered.
func (f *fixture) settle() {
	f.Helper()
	must(f, f.store.Settle(f.Context()))
}

// moved are the moves of one kind to a level.
func (f *fixture) moved(level int, kind moves.Kind) *moves.Counter {
	return &f.store.levels[level].count[kind]
}

// TestDemotion: what the near root has no room for is copied to the next level, byte for byte, if something continues
// it or it was hit; what ends a prefix and nobody asked for is dropped. No level is over its capacity, and nothing is
// written twice.
func TestDemotion(t *testing.T) {
	f := twoLevels(t, 16, 256)
	for n := range uint64(64) { // one prefix of 64 chunks
		f.mustPut(n)
		f.settle()
	}
	f.checkUsed()
	near := 0
	for n := range uint64(64) {
		if at := f.rootOf(n); at < 0 {
			t.Errorf("entry %d is in no level", n)
		} else if at == 0 {
			near++
		}
	}
	for n := range uint64(64) {
		f.mustRead(n)
		f.settle() // it comes nearer, and what has been hit leaves for that
	}
	if near < 14 || near > 16 {
		t.Errorf("%d entries in the near root, which holds 16", near)
	}
	d := f.moved(1, moves.Demotion)
	equal(t, "entries that went without a copy", d.Shed.Load(), 0)
	written := f.store.Stats().Roots[1].Published
	equal(t, "copies", d.Done.Load(), written)
	for n := uint64(100); n < 140; n++ { // chunks that nothing continues
		must(t, f.putUnder(n, n, 0))
		f.settle()
	}
	equal(t, "entries that were refused", d.Refused.Load() > 20, true)
	equal(t, "an entry that nobody asked for", f.rootOf(100), -1)
	f.mustPut(200)
	f.lookup(200).Release()
	for n := uint64(300); n < 320; n++ {
		must(t, f.putUnder(n, n, 0))
		f.settle()
	}
	equal(t, "an entry that was hit", f.rootOf(200), 1)
	f.mustRead(200)
	f.settle()
	f.checkUsed()
}

// TestPromotion: an entry of the far level comes near after its second load, and a load after that is from there. A
// lookup that asks for it brings it near at once, and its lease then opens the near copy.
func TestPromotion(t *testing.T) {
	f := twoLevels(t, 16, 256)
	for n := range uint64(64) {
		f.mustPut(n)
		f.settle()
	}
	equal(t, "root of the first entry", f.rootOf(0), 1)
	equal(t, "root of the second entry", f.rootOf(1), 1)
	f.mustRead(0) // one lookup before, one now
	f.settle()
	equal(t, "root of an entry that was loaded at its second hit", f.rootOf(0), 0)
	p := f.moved(0, moves.Promotion)
	equal(t, "promotions", p.Done.Load(), 1)
	f.mustRead(0)

	l, err := f.store.Lookup(LookupRequest{Namespace: f.space, Keys: keys(2, 3), Prefetch: true})
	must(t, err)
	f.settle()
	for i := range 2 {
		equal(t, "level of a hit that was asked for", f.levelOf(l, i), 0)
		p, err := l.Open(i, 0)
		must(t, err)
		equal(t, "root of its piece", p.Root(), f.cfg.Roots[0].Path)
		p.Close()
	}
	if r := f.root(); r.Evictor.Evictable(r.Index.FindFingerprint(l.grants[0].Fingerprint)) {
		t.Error("the copy is not pinned")
	}
	l.Release()
	f.mustRead(2)
	f.settle()
	f.checkUsed()
	for _, r := range f.store.roots {
		_, inUse := r.Census()
		equal(t, "entries in use", inUse, 0)
	}
}

// TestWriteThrough: what is stored in a root that writes through is in the next level at once.
func TestWriteThrough(t *testing.T) {
	f := twoLevels(t, 64, 256, func(c *Config) { c.Roots[0].Through = true })
	f.mustPut(0, 1, 2)
	f.settle()
	equal(t, "copies", f.moved(1, moves.Through).Done.Load(), 3)
	f.takeOut(0)
	for n := range uint64(3) {
		equal(t, "root of an entry", f.rootOf(n), 1)
		f.mustRead(n)
	}
}

// TestOrderlyEnd: what a root in memory holds is in the next level after a restart, as far as the built-in rule keeps
// it, and nothing more than before when no time is given.
func TestOrderlyEnd(t *testing.T) {
	for _, c := range []struct {
		limit time.Duration
		want  int
	}{{time.Minute, 9}, {0, 0}} {
		f := twoLevels(t, 64, 256, func(cfg *Config) { cfg.Roots[0].Volatile, cfg.Moves.Shutdown = true, c.limit })
		f.mustPut(0, 1, 2, 3, 4, 5, 6, 7, 8, 9)
		must(t, f.store.Close())
		must(t, os.RemoveAll(f.cfg.Roots[0].Path))
		f.start()
		l := f.lookup(0, 1, 2, 3, 4, 5, 6, 7, 8, 9)
		equal(t, "hits after the restart", l.Hits(), c.want) // nothing continues the last one
		l.Release()
		f.checkUsed()
	}
}

// TestDemotionThatCannotBe: a level that is out of service, or has no room, is a miss of its own: the near root works
// as if it were alone.
func TestDemotionThatCannotBe(t *testing.T) {
	f := twoLevels(t, 8, 64, func(c *Config) { c.UpkeepEvery = time.Hour })
	f.takeOut(1)
	for n := range uint64(40) {
		f.mustPut(n)
		f.settle()
	}
	near := 0
	for n := range uint64(40) {
		if f.rootOf(n) == 0 {
			near++
		}
	}
	if near < 7 {
		t.Errorf("%d entries are left in a root of 8", near)
	}
	equal(t, "copies", f.moved(1, moves.Demotion).Done.Load(), 0)
	if d := f.moved(1, moves.Demotion); d.Failed.Load()+d.Refused.Load() < 20 || d.Failed.Load() == 0 {
		t.Errorf("%d copies have failed, %d were refused, %d shed, %d cancelled", d.Failed.Load(), d.Refused.Load(),
			d.Shed.Load(), d.Cancelled.Load())
	}
	f.checkUsed()
}

// TestDiscardWhileItMoves: what is discarded while it is copied is in no level afterwards.
func TestDiscardWhileItMoves(t *testing.T) {
	f := twoLevels(t, 64, 256, func(c *Config) { c.Roots[0].Through = true })
	for n := range uint64(60) {
		f.mustPut(n)
		results, err := f.store.Discard(DiscardRequest{Namespace: f.space, Keys: keys(n)})
		must(t, err)
		f.settle()
		if at := f.rootOf(n); results[0] == DiscardRemoved && at >= 0 {
			t.Fatalf("entry %d was discarded, and is in root %d", n, at)
		}
	}
	f.checkUsed()
}
