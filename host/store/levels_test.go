package store

import (
	"path/filepath"
	"testing"
	"time"

	"github.com/kvhost/kvhost/host/store/changelog"
	"github.com/kvhost/kvhost/host/store/health"
	"github.com/kvhost/kvhost/host/store/moves"
	"golang.org/x/sys/unix"
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
	near := f.store.roots[0]
	near.Health.TakeOut("test", unix.EIO, "none")
	equal(t, "state of the near root", near.Health.State() > health.Full, true)
	equal(t, "root of an entry while its root is out", f.rootOf(0), -1)
	f.mustPut(0, 3)
	equal(t, "root of an entry that was stored again", f.rootOf(0), 1)
	equal(t, "root of an entry that was stored meanwhile", f.rootOf(3), 1)
	if err := f.store.Maintain(t.Context(), 0, Probe); err != nil {
		t.Fatal(err)
	}
	equal(t, "the nearest of two copies", f.rootOf(0), 0)
	equal(t, "the only copy", f.rootOf(3), 1)
	if err := f.put(3, 0); err == nil {
		t.Error("an entry of the far level was stored a second time")
	}
	results, err := f.store.Discard(DiscardRequest{Namespace: f.space, Keys: keys(0, 3)})
	if err != nil {
		t.Fatal(err)
	}
	for i, r := range results {
		equal(t, "result of DISCARD", r, DiscardRemoved)
		equal(t, "root of a discarded entry", f.rootOf([]uint64{0, 3}[i]), -1)
	}
	gone := map[string]int{}
	changes, _, err := log.Read(start, make([]changelog.Change, 0, 16))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range changes {
		if c.Kind == changelog.Evicted {
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
	if err := f.store.Settle(f.Context()); err != nil {
		f.Fatal(err)
	}
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
		f.mustRead(n)
	}
	if near < 14 || near > 16 {
		t.Errorf("%d entries in the near root, which holds 16", near)
	}
	d := f.moved(1, moves.Demotion)
	equal(t, "sheds", d.Shed.Load(), 0)
	written := f.store.Stats().Roots[1].Published
	equal(t, "copies", d.Done.Load(), written)
	for n := uint64(100); n < 140; n++ { // chunks that nothing continues
		if err := f.putUnder(n, n, 0); err != nil {
			t.Fatal(err)
		}
		f.settle()
	}
	equal(t, "entries that were refused", d.Refused.Load() > 20, true)
	equal(t, "an entry that nobody asked for", f.rootOf(100), -1)
	f.mustPut(200)
	f.lookup(200).Release()
	for n := uint64(300); n < 320; n++ {
		if err := f.putUnder(n, n, 0); err != nil {
			t.Fatal(err)
		}
		f.settle()
	}
	equal(t, "an entry that was hit", f.rootOf(200), 1)
	f.mustRead(200)
	f.checkUsed()
}
