package store

import (
	"errors"
	"log/slog"
	"testing"

	"github.com/kvhost/kvhost/host/internal/memfs"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/internal/store/moves"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// beforeDisk is a fixture with memory before a directory, and entries that are in the directory alone.
func beforeDisk(t *testing.T, entries uint64, change func(memory, far *RootConfig)) *fixture {
	t.Helper()
	memory, err := memfs.New(16<<20, slog.New(slog.DiscardHandler))
	must(t, err)
	t.Cleanup(func() { memory.Close() })
	f := compressing(t, t.TempDir(), func(c *Config) {
		c.Moves.Workers = 1
		near := RootConfig{
			Path: "memory:", Medium: Medium{FS: memory, Traits: Memory}, ForPieces: true, Capacity: 16 << 20, MaxEntries: 64,
		}
		far := c.Roots[0]
		far.Level, far.Compressed = 1, false
		change(&near, &far)
		c.Roots = []RootConfig{near, far}
	})
	f.takeOut(0)
	for n := range entries {
		must(t, f.storeHalf(n))
	}
	must(t, f.store.Maintain(t.Context(), 0, Probe))
	return f
}

// loadRuns opens a piece as a load does, and hands runs of its extents on. It is not closed yet.
func (f *fixture) loadRuns(l *Lease, i int, runs ...[2]int) *Piece {
	f.Helper()
	p, err := l.Open(i, 0)
	must(f, err)
	image := make([]byte, p.Size())
	if _, err := p.File().ReadAt(image, 0); err != nil {
		f.Fatal(err)
	}
	head, err := p.Verify(image)
	must(f, err)
	for _, run := range runs {
		from, _ := head.At(run[0])
		_, to := head.At(run[1] - 1)
		if !head.Compressed {
			must(f, kv.VerifyExtents(head.Plan, run[0], run[1], image[from:to], from-head.DataOffset, head.Table))
		}
		p.Keep(run[0], run[1], image[from:to], from-head.DataOffset)
	}
	return p
}

// checkAccounts compares each root's account with its index, and nothing may be pinned or reserved.
func (f *fixture) checkAccounts() {
	f.Helper()
	for _, r := range f.store.roots {
		must(f, r.idle())
	}
}

func (f *fixture) isNear(n uint64) bool {
	return f.store.roots[0].Has(fingerprintOf(f, n), index.Complete)
}

// TestLoadBringsNear: a piece that a load has read whole from a disk is in memory when the load ends, as it is on the disk, with no copy in
// the background. What was not read whole is not there, nor what was being copied, and nothing of it stays reserved.
func TestLoadBringsNear(t *testing.T) {
	f := beforeDisk(t, 4, func(_, _ *RootConfig) {})
	l := f.lookup(upTo(4)...)
	f.loadRuns(l, 0, [2]int{2, 4}, [2]int{0, 2}, [2]int{4, 6}).Close() // in whatever order
	equal(t, "an entry that was read whole is near", f.isNear(0), true)
	f.loadRuns(l, 1, [2]int{0, 2}, [2]int{0, 2}, [2]int{4, 6}).Close()
	equal(t, "an entry that was read in part is near", f.isNear(1), false)
	first := f.loadRuns(l, 2, [2]int{0, 3})
	f.loadRuns(l, 2, [2]int{0, 6}).Close()
	equal(t, "an entry is near that another load began to copy", f.isNear(2), false)
	p := f.loadRuns(l, 2, [2]int{3, 6})
	first.Close()
	p.Close()
	equal(t, "an entry of which two loads read a part each is near", f.isNear(2), false)
	n := f.moved(0, moves.Promotion)
	equal(t, "copies by loads", n.Done.Load(), 1)
	equal(t, "copies that were given up", n.Cancelled.Load(), 2)
	if head, root := f.readHalf(0); root != "memory:" || head.Compressed {
		t.Errorf("the first entry is read from %s, compressed %t; want memory:, false", root, head.Compressed)
	}
	l.Release()
	f.settle()
	for n := range uint64(4) { // the others come in the background
		equal(t, "an entry is near in the end", f.isNear(n), true)
		f.readHalf(n)
	}
	f.checkAccounts()
}

// TestLoadLeavesFar: what a load reads stays where it is if memory has or gets another form of it, or the policy does not want it.
func TestLoadLeavesFar(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(near, far *RootConfig)
	}{
		{"compressed on the disk", func(_, far *RootConfig) { far.Compressed = true }},
		{"compressed in memory", func(near, _ *RootConfig) { near.Compressed = true }},
		{"no room in memory", func(near, _ *RootConfig) { near.Capacity = 64 << 10 }},
		{"no memory", func(near, _ *RootConfig) { near.Path, near.Medium, near.ForPieces = t.TempDir(), Medium{}, false }},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := beforeDisk(t, 1, c.change)
			l := f.lookup(0)
			f.loadRuns(l, 0, [2]int{0, 6}).Close()
			equal(t, "the entry is near", f.isNear(0), false)
			l.Release()
			f.settle()
			f.checkAccounts()
		})
	}
}

// TestLoadBringsNearWhileItGoes: an entry that is dropped while a load reads it is not near afterwards.
func TestLoadBringsNearWhileItGoes(t *testing.T) {
	f := beforeDisk(t, 1, func(_, _ *RootConfig) {})
	l := f.lookup(0)
	p := f.loadRuns(l, 0, [2]int{0, 6})
	p.Bad(kv.ErrChecksum)
	p.Close()
	equal(t, "a dropped entry is near", f.isNear(0), false)
	l.Release()
	f.settle()
	f.checkAccounts()
}

// TestLoadTakesOverPrefetch: a lookup asked for copies that still wait behind others; what its lease loads comes near by the load.
func TestLoadTakesOverPrefetch(t *testing.T) {
	f := beforeDisk(t, 2, func(_, _ *RootConfig) {})
	open := f.shut()
	l := f.prefetch(0, 1)
	f.loadRuns(l, 0, [2]int{0, 6}).Close()
	equal(t, "an entry that was read whole is near", f.isNear(0), true)
	equal(t, "an entry that was not read is near", f.isNear(1), false)
	l.Release()
	open()
	f.settle()
	f.readHalf(0)
	f.checkAccounts()
}

// TestLoadAwaitsNoMemory: a load does not wait for memory that is being allocated, which waits for loads.
func TestLoadAwaitsNoMemory(t *testing.T) {
	memory := &allocating{FS: staging.OS()}
	memory.set(0, 16<<20)
	f := beforeDisk(t, 1, func(near, _ *RootConfig) {
		near.Path, near.Medium = t.TempDir(), Medium{FS: memory, Traits: Traits{Volatile: true}}
	})
	f.lookup(0).Release()
	l := f.lookup(0)
	f.loadRuns(l, 0, [2]int{0, 6}).Close()
	equal(t, "copies that waited for nothing", f.moved(0, moves.Promotion).Shed.Load(), 1)
	equal(t, "state of the memory", f.store.Stats().Roots[0].State, health.In)
	l.Release()
	f.settle()
}

// TestStoreBringsNear: a client that has computed what only the disk has stores it in memory, too, and no copy in the background does it again. A
// put that ends without its piece leaves nothing there; on the disk everything is as it was.
func TestStoreBringsNear(t *testing.T) {
	f := beforeDisk(t, 4, func(_, _ *RootConfig) {})
	log := f.store.Changes()
	start := log.Start()
	must(t, f.storeHalf(0))
	equal(t, "an entry that was stored again is near", f.isNear(0), true)
	if head, root := f.readHalf(0); root != "memory:" || head.Compressed {
		t.Errorf("the entry is read from %s, compressed %t; want memory:, false", root, head.Compressed)
	}
	if err := f.storeHalf(0); !errors.Is(err, ErrResident) {
		t.Errorf("an entry of both levels was stored again: got %v, want %v", err, ErrResident)
	}

	open := f.shut()
	l := f.prefetch(1, 2)
	must(t, f.storeHalf(1))
	open()
	f.settle()
	l.Release()
	n := f.moved(0, moves.Prefetch)
	equal(t, "copies in the background of what the client has not stored", n.Done.Load(), 1)
	equal(t, "copies that were not wanted any more", n.Cancelled.Load(), 1)

	p, err := f.store.Put(t.Context(), f.request(3, 0, 0))
	must(t, err)
	if err := f.storeHalf(3); !errors.Is(err, ErrResident) {
		t.Errorf("an entry that is being stored was stored again: got %v, want %v", err, ErrResident)
	}
	p.Abort(moves.ErrCancelled)
	equal(t, "an entry is near of which nothing was stored", f.isNear(3), false)
	f.readHalf(3)

	changes, _, err := log.Read(start, make([]entries.Change, 0, 16))
	must(t, err)
	equal(t, "changes of what was there all the time", len(changes), 0)
	f.settle()
	f.checkAccounts()
}

// TestStoreLeavesFar: what the disk has is resident for a client where memory does not take it.
func TestStoreLeavesFar(t *testing.T) {
	f := beforeDisk(t, 2, func(near, _ *RootConfig) { near.Capacity = 64 << 10 })
	if err := f.storeHalf(0); !errors.Is(err, ErrResident) {
		t.Errorf("stored where there is no room: got %v, want %v", err, ErrResident)
	}
	equal(t, "the entry is near", f.isNear(0), false)
	f.readHalf(0)
	f.settle()
	f.checkAccounts()
}

// TestStoreBringsAllRanksNear: the pieces of an entry come near one by one, and the entry when it has all of them.
func TestStoreBringsAllRanksNear(t *testing.T) {
	memory, err := memfs.New(1<<20, slog.New(slog.DiscardHandler))
	must(t, err)
	t.Cleanup(func() { memory.Close() })
	f := newFixtureIn(t, t.TempDir(), 8, 2, func(c *Config) {
		near, far := c.Roots[0], c.Roots[0]
		near.Path, near.Medium, near.ForPieces, near.Capacity = "memory:", Medium{FS: memory, Traits: Memory}, true, 1<<20
		far.Level = 1
		c.Roots, c.Moves.Workers = []RootConfig{near, far}, 1
	})
	f.takeOut(0)
	f.mustPutRanks(0, 0, 0b11)
	must(t, f.store.Maintain(t.Context(), 0, Probe))
	open := f.shut() // else what is looked up is copied near
	equal(t, "root of an entry that was stored while the nearest was out", f.rootOf(0), 1)
	must(t, f.putRank(0, 0, 0, 0b11))
	equal(t, "root of an entry with one near piece of two", f.rootOf(0), 1)
	must(t, f.putRank(0, 0, 1, 0b11))
	equal(t, "root of an entry with both pieces near", f.rootOf(0), 0)
	open()
	f.settle()
	f.checkAccounts()
}
