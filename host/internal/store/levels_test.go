package store

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/internal/store/moves"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// twoLevels is a fixture with a root of level 0, which holds so many entries, before one of level 1, which has room.
func twoLevels(t *testing.T, near, far int, change ...func(*Config)) *fixture {
	t.Helper()
	return newFixtureIn(t, filepath.Join(t.TempDir(), "near"), near, 1, append([]func(*Config){func(c *Config) {
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

func fingerprintOf(f *fixture, n uint64) uint64 { return kv.Fingerprint(f.space.Digest, 0, testKey(n)) }

// allocating is a file system in memory of which so many bytes are there, of those that will be.
type allocating struct {
	staging.FS
	ready, total atomic.Int64
}

func (a *allocating) set(ready, total int64) {
	a.ready.Store(ready)
	a.total.Store(total)
}

// Statfs says what is free now, and what will be.
func (a *allocating) Statfs(string) (staging.Space, error) {
	return staging.Space{Total: a.total.Load(), Free: a.total.Load(), Available: a.ready.Load()}, nil
}

// TestStoresDoNotWaitForMemory: while memory is being allocated, what has no room there goes to the next level, and comes near when it
// has. Where there is none, or its policy refuses it, it waits.
func TestStoresDoNotWaitForMemory(t *testing.T) {
	var memory *allocating
	withReady := func(bytes int64) func(*Config) {
		return func(c *Config) {
			memory = &allocating{FS: staging.Below(c.Roots[0].Path)}
			memory.set(bytes, 8*pieceBytes)
			c.Roots[0].Volatile, c.Roots[0].FS = true, memory
		}
	}
	f := twoLevels(t, 8, 64, withReady(2*pieceBytes))
	roots := func() (list []int) {
		for n := range uint64(4) {
			list = append(list, f.rootOf(n))
		}
		return list
	}
	f.mustPut(0, 1, 2)
	memory.set(8*pieceBytes, 8*pieceBytes)
	f.mustPut(3)
	equal(t, "roots of entries, of which the third had no memory", fmt.Sprint(roots()), fmt.Sprint([]int{0, 0, 1, 0}))
	f.root().bringNear()
	f.settle()
	equal(t, "roots of entries once the memory was there", fmt.Sprint(roots()), fmt.Sprint([]int{0, 0, 0, 0}))
	equal(t, "copies that came near", f.moved(0, moves.Promotion).Done.Load(), 1)
	f.checkUsed()

	h := handle(policy.NativeModule("ends", []abi.Role{abi.RoleAdmit}, func(guest.Info) (any, error) { return &ends{}, nil }))
	h.Levels = 3
	refused := twoLevels(t, 8, 64, withReady(0), func(c *Config) { c.Policies.Admit = h })
	refused.mustPut(0)
	equal(t, "root of an entry that the next level refuses", refused.rootOf(0), 0)
	equal(t, "entries refused", refused.store.Stats().Refused, 0)
	alone := newFixtureIn(t, filepath.Join(t.TempDir(), "alone"), 8, 1, withReady(0))
	alone.mustPut(0)
}

// TestHitComesNear: after one read of a part of a hit all of it is near, where the near root has room, however far that is filled; also what
// nothing was read of, as where computing it would take no longer. What is only pinned stays where it is.
func TestHitComesNear(t *testing.T) {
	for _, c := range []struct {
		name string
		read int // of a hit of six
		pin  bool
		near int
	}{{"read whole", 6, false, 6}, {"read in part", 2, false, 6}, {"not read", 0, false, 6}, {"pinned", 0, true, 0}} {
		t.Run(c.name, func(t *testing.T) {
			f := twoLevels(t, 16, 64, func(c *Config) { c.UpkeepEvery = time.Hour })
			f.takeOut(0)
			f.mustPut(upTo(6)...)
			must(t, f.store.Maintain(t.Context(), 0, Probe))
			for n := uint64(20); n < 30; n++ {
				f.mustPut(n)
			}
			l, err := f.store.Lookup(LookupRequest{Namespace: f.space, Keys: keys(upTo(6)...), Pin: c.pin})
			must(t, err)
			equal(t, "hits", l.Hits(), 6)
			for i := range c.read {
				f.openIn(l, i, 1)
			}
			l.Release()
			f.settle()
			near := 0
			for n := range uint64(6) {
				if f.store.roots[0].Has(fingerprintOf(f, n), index.Complete) {
					near++
				}
			}
			equal(t, "entries of the hit that are near", near, c.near)
			equal(t, "entries that went for them", f.store.Stats().Roots[0].Evictions, 0)
		})
	}
}

// TestMemoryThatStaysSmaller: a root in memory takes what there is when the machine has no more: all that came early is near then, stores
// evict instead of failing, and what it has leaves in time.
func TestMemoryThatStaysSmaller(t *testing.T) {
	memory := &allocating{}
	memory.set(4*pieceBytes, 16*pieceBytes)
	f := twoLevels(t, 16, 64, func(c *Config) {
		memory.FS = staging.Below(c.Roots[0].Path)
		c.Roots[0].Volatile, c.Roots[0].FS, c.Roots[0].MinFree, c.UpkeepEvery = true, memory, 1, time.Hour
	})
	f.mustPut(upTo(8)...)
	memory.set(8*pieceBytes+1, 8*pieceBytes+1) // and that is all
	freeSpace{f.root()}.watch(t.Context())
	f.root().bringNear()
	f.settle()
	for n := range uint64(8) {
		equal(t, "root of an entry that has room", f.rootOf(n), 0)
	}
	equal(t, "limit of the root", f.root().Account.Figures().Limit, 8*pieceBytes)
	for n := uint64(8); n < 20; n++ {
		f.mustPut(n)
		equal(t, "root of a new entry", f.rootOf(n), 0)
		equal(t, "more in use than there is", f.root().Account.Excess(1) > 0, false)
		f.settle()
	}
	memory.set(16*pieceBytes+1, 16*pieceBytes+1)
	freeSpace{f.root()}.watch(t.Context())
	equal(t, "limit of the root once there is more", f.root().Account.Figures().Limit, 16*pieceBytes)
	f.checkUsed()
}

// TestNearBeforeThrough: what is to come near, because it was hit or came before its memory, waits behind no copy for a later life.
func TestNearBeforeThrough(t *testing.T) {
	var order []string
	f := twoLevels(t, 32, 64, func(c *Config) {
		c.UpkeepEvery, c.Moves.Workers, c.Roots[0].Write = time.Hour, 1, WriteThrough
		for i, to := range []string{"near", "far"} {
			c.Roots[i].FS = watched{staging.Below(c.Roots[i].Path), func(at string) {
				if at == "create" {
					order = append(order, to)
				}
			}}
		}
	})
	f.takeOut(0)
	f.mustPut(0, 1)
	must(t, f.store.Maintain(t.Context(), 0, Probe))
	open := f.shut()
	f.mustPut(10, 11, 12)
	f.mustRead(10, 11, 12)
	f.mustRead(0)
	far, fp := f.store.roots[1], fingerprintOf(f, 1)
	f.store.levels[0].early.add(early{&far.origin, entries.Mark{Slot: far.Index.FindFingerprint(fp), Fingerprint: fp}})
	f.root().bringNear()
	order = nil
	open()
	f.settle()
	equal(t, "order of the copies", fmt.Sprint(order), fmt.Sprint([]string{"near", "near", "far", "far", "far"}))
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
	must(t, f.put(3, 0)) // after one lookup: a second one would have it copied there
	equal(t, "root of an entry that was stored where it had been lacking", f.rootOf(3), 0)
	for range 2 {
		if err := f.put(3, 0); !errors.Is(err, ErrResident) {
			t.Errorf("an entry of both levels was stored again: got %v, want %v", err, ErrResident)
		}
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
	f.settle()
	for _, n := range []uint64{0, 3} {
		equal(t, "ends of an entry with two copies", gone[testKey(n).String()], 1)
	}
	f.checkUsed()
}

// TestOneVersionInAllLevels: a piece that a farther level has is not stored a second time into the nearer entry that lacks
// it, as one does that is being copied: once that was evicted, the older piece would come back.
func TestOneVersionInAllLevels(t *testing.T) {
	f := newFixtureIn(t, filepath.Join(t.TempDir(), "near"), 8, 2, func(c *Config) {
		c.Roots = append(c.Roots, RootConfig{
			Path: filepath.Join(t.TempDir(), "far"), Capacity: 64 * pieceBytes, MaxEntries: 64, Level: 1,
		})
		c.UpkeepEvery = time.Hour
	})
	must(t, f.putRank(0, 0, 0, 0b11))
	f.takeOut(0)
	f.mustPutRanks(0, 0, 0b11)
	must(t, f.store.Maintain(t.Context(), 0, Probe))
	equal(t, "root of the whole entry", f.rootOf(0), 1)
	if err := f.putRank(0, 0, 1, 0b11); !errors.Is(err, ErrResident) {
		t.Errorf("the piece that only the far level has was stored again: got %v, want %v", err, ErrResident)
	}
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
	if near < 14 || near > 16 {
		t.Errorf("%d entries in the near root, which holds 16", near)
	}
	d := f.moved(1, moves.Demotion)
	equal(t, "entries that went without a copy", d.Shed.Load(), 0)
	for n := range uint64(64) {
		f.mustRead(n)
		f.settle() // it comes nearer, and what was hit less leaves for that: with a copy, unless the copy would come too late
	}
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
	f := twoLevels(t, 64, 256, func(c *Config) { c.Roots[0].Write = WriteThrough })
	f.mustPut(0, 1, 2)
	f.settle()
	equal(t, "copies", f.moved(1, moves.Through).Done.Load(), 3)
	f.takeOut(0)
	for n := range uint64(3) {
		equal(t, "root of an entry", f.rootOf(n), 1)
		f.mustRead(n)
	}
}

// TestWriteOnHits: what was loaded once from a root that writes hits is in the next level, and what was not is not. The share of what memory
// holds that outlives it is told.
func TestWriteOnHits(t *testing.T) {
	f := twoLevels(t, 64, 256, func(c *Config) { c.Roots[0].Write, c.Roots[0].Volatile = WriteHits, true })
	f.mustPut(0, 1, 2)
	f.settle()
	equal(t, "copies of what was not loaded", f.moved(1, moves.Through).Done.Load(), 0)
	f.mustRead(1)
	f.settle()
	f.mustRead(1)
	f.settle()
	equal(t, "copies of what was loaded", f.moved(1, moves.Through).Done.Load(), 1)
	equal(t, "copies that were offered twice", f.moved(1, moves.Through).Cancelled.Load(), 0)
	level := f.store.Stats().Levels[0]
	equal(t, "entries in memory", level.Volatile, 3)
	equal(t, "entries that outlive it", level.Kept, 1)
	f.takeOut(0)
	equal(t, "root of what was loaded", f.rootOf(1), 1)
	equal(t, "root of what was not", f.rootOf(0), -1)
}

// TestShedIsSaid: the log says that entries go without a copy, and how many of memory have one, once a minute.
func TestShedIsSaid(t *testing.T) {
	var now atomic.Int64
	now.Store(1e18)
	var log bytes.Buffer
	f := twoLevels(t, 8, 64, func(c *Config) {
		c.Roots[0].Volatile, c.UpkeepEvery, c.Moves.Workers = true, time.Hour, 1
		c.Now = func() time.Time { return time.Unix(0, now.Load()) }
		c.Log = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelWarn}))
	})
	lines := func() int {
		f.store.levels[0].sayShed()
		return bytes.Count(log.Bytes(), []byte("copies to the next level are shed"))
	}
	f.shut()
	f.mustPut(upTo(8)...)
	equal(t, "lines while all is near", lines(), 0)
	f.mustPut(8, 9, 10, 11)
	equal(t, "lines once entries went", lines(), 1)
	f.mustPut(12, 13, 14, 15, 16, 17, 18, 19)
	equal(t, "lines within a minute", lines(), 1)
	now.Add(int64(time.Minute))
	equal(t, "lines a minute later", lines(), 2)
	now.Add(int64(time.Minute))
	equal(t, "lines when no more went", lines(), 2)
}

// bounded is a file system in which so many more files can be made.
type bounded struct {
	staging.FS
	left *atomic.Int64
}

func (b bounded) OpenFile(name string, flag int, perm fs.FileMode) (staging.File, error) {
	if flag&os.O_CREATE != 0 && b.left.Add(-1) < 0 {
		return nil, &fs.PathError{Op: "open", Path: name, Err: unix.EACCES}
	}
	return b.FS.OpenFile(name, flag, perm)
}

// TestOrderlyEndOfAFew: where an orderly end cannot copy all, it copies what was hit, and of that the latest.
func TestOrderlyEndOfAFew(t *testing.T) {
	var left atomic.Int64
	f := twoLevels(t, 64, 256, func(c *Config) {
		c.Roots[0].Volatile, c.UpkeepEvery = true, time.Hour
		c.Roots[1].FS = bounded{staging.Below(c.Roots[1].Path), &left}
		c.Moves.Workers, c.Moves.Shutdown = 1, time.Minute
		left.Store(1 << 30)
	})
	for n := range uint64(20) {
		must(t, f.putUnder(n, n, 0)) // each is a prefix
	}
	for _, n := range []uint64{7, 3, 12, 5} {
		f.mustRead(n)
	}
	left.Store(3)
	must(t, f.store.Close())
	must(t, os.RemoveAll(f.cfg.Roots[0].Path))
	left.Store(1 << 30)
	f.start()
	var found []uint64
	for n := range uint64(20) {
		if f.rootOf(n) >= 0 {
			found = append(found, n)
		}
	}
	equal(t, "entries of the next life", fmt.Sprint(found), fmt.Sprint([]uint64{3, 5, 12}))
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
		f.settle() // the hits come near
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

// watched calls at before each step of a copy in a root, and after its publication.
type watched struct {
	staging.FS
	at func(step string)
}

func (w watched) OpenFile(name string, flag int, perm fs.FileMode) (staging.File, error) {
	if flag&os.O_CREATE != 0 {
		w.at("create")
	} else {
		w.at("open")
	}
	return w.FS.OpenFile(name, flag, perm)
}

func (w watched) RenameNoReplace(from, to string) error {
	w.at("publish")
	err := w.FS.RenameNoReplace(from, to)
	w.at("published")
	return err
}

func (w watched) Link(from, to string) error {
	w.at("publish")
	err := w.FS.Link(from, to)
	w.at("published")
	return err
}

// TestDiscardWhileItMoves: what is discarded at any step of its copy is removed at once, and is in no level afterwards.
func TestDiscardWhileItMoves(t *testing.T) {
	for _, c := range []struct {
		step   string
		root   int
		shared bool
	}{
		{"open", 0, false}, {"create", 1, false}, {"publish", 1, false}, {"published", 1, false},
		{"publish", 1, true}, {"published", 1, true},
	} {
		t.Run(fmt.Sprintf("%s, shared %t", c.step, c.shared), func(t *testing.T) {
			var f *fixture
			var next uint64
			var results []DiscardResult
			var armed atomic.Bool
			f = twoLevels(t, 64, 256, func(cfg *Config) {
				cfg.Roots[0].Write = WriteThrough
				if c.shared {
					shareRoot(&cfg.Roots[1])
				}
				cfg.Roots[c.root].FS = watched{staging.Below(cfg.Roots[c.root].Path), func(at string) {
					if at != c.step || !armed.CompareAndSwap(true, false) {
						return
					}
					got, err := f.store.Discard(DiscardRequest{Namespace: f.space, Keys: keys(next)})
					results = append(results, got...)
					must(t, err)
				}}
			})
			for ; next < 5; next++ {
				armed.Store(true)
				f.mustPut(next)
				f.settle()
				equal(t, "root of what was discarded", f.rootOf(next), -1)
			}
			equal(t, "results", fmt.Sprint(results), fmt.Sprint(slices.Repeat([]DiscardResult{DiscardRemoved}, 5)))
			await(t, "no root has any bytes", func() bool {
				return !slices.ContainsFunc(f.store.Stats().Roots, func(r RootStats) bool { return r.Used != 0 })
			})
			f.mustPut(next)
			f.settle()
			equal(t, "copies of what stays", f.moved(1, moves.Through).Done.Load(), 1)
		})
	}
}

// slowMoves lets copies between levels take longer than any test.
func slowMoves(c *Config) { c.Moves.Bandwidth = 1 }

// TestNewStaysNear: what is new is in the near root, however slowly that copies what it evicts, and is never refused for it. What goes
// for want of room is what was hit least of what leaves, and is counted.
func TestNewStaysNear(t *testing.T) {
	f := twoLevels(t, 32, 256, slowMoves)
	f.mustPut(upTo(32)...)
	f.root().leaving.Step() // the first eight leave
	f.mustRead(2)           // it stays, and is asked for again
	for n := uint64(32); n < 36; n++ {
		f.mustPut(n)
		equal(t, "root of a new entry", f.rootOf(n), 0)
	}
	equal(t, "root of an entry that was hit", f.rootOf(2), 0)
	lost := f.moved(1, moves.Demotion).Shed.Load()
	if lost < 3 || lost > 5 {
		t.Errorf("%d entries went without a copy, want some four", lost)
	}
	for n := uint64(36); n < 200; n++ {
		f.mustPut(n)
		equal(t, "root of a new entry", f.rootOf(n), 0)
	}
	equal(t, "entries in the next level", f.store.Stats().Roots[1].Entries <= 2, true) // of the two workers
	f.checkUsed()
}

// TestLeastAskedForGoes: of what leaves and has no copy yet, what was hit least goes first, and what has a copy before that.
func TestLeastAskedForGoes(t *testing.T) {
	f := twoLevels(t, 32, 256)
	f.mustPut(upTo(4)...)
	r := f.root()
	r.Lock()
	for n, hits := range []int{2, 1, 0, 3} {
		slot := r.Index.FindFingerprint(fingerprintOf(f, uint64(n)))
		for range hits {
			r.Moves.Granted(slot, r.Index.At(slot), true)
		}
		r.Moves.Leave(slot)
	}
	next := func(spares uint32) string {
		slot, settled := r.Moves.NextLeaving(abi.None, spares)
		if slot == index.None {
			return "none"
		}
		hits := r.Hits.Of(slot)
		v := r.BeginEvict(slot)
		r.FinishEvict(&v)
		return fmt.Sprintf("%d %t", hits, settled)
	}
	equal(t, "what goes first", next(0), "0 false")
	equal(t, "what goes for a copy with a hit", next(1), "none")
	equal(t, "what goes for a copy with two", next(2), "1 false")
	equal(t, "what goes next", next(0), "2 false")
	r.Unlock()
}

// TestPromotionBehind: a copy from the far level takes the room of what has a copy there, or was hit less, and of nothing else.
func TestPromotionBehind(t *testing.T) {
	f := twoLevels(t, 16, 256, func(c *Config) { c.UpkeepEvery, c.Moves.Workers = time.Hour, 1 })
	f.shut()
	f.takeOut(0)
	f.mustPut(100)
	f.lookup(100).Release()
	must(t, f.store.Maintain(t.Context(), 0, Probe))
	f.mustPut(upTo(16)...)
	f.lookup(upTo(16)...).Release()
	f.root().leaving.Step()
	near, far := f.store.levels[0], f.store.roots[1]
	far.Lock()
	m := far.Moves.Copy(far.Index.FindFingerprint(fingerprintOf(f, 100)))
	far.Unlock()
	e := &moves.Entry{Move: m, Kind: moves.Promotion, From: &far.origin, To: near, Namespace: f.space, Pieces: 1}
	h := &pieceformat.Header{Key: testKey(100), Pieces: 1, Plan: f.space.Plan(0).Digest()}
	if _, err := near.Begin(t.Context(), e, h); !errors.Is(err, moves.ErrBehind) {
		t.Errorf("a copy that was hit as often as all that is near: got %v, want %v", err, moves.ErrBehind)
	}
	f.lookup(100).Release()
	to, err := near.Begin(t.Context(), e, h)
	must(t, err)
	equal(t, "entries that went for one that was hit more", f.store.Stats().Roots[0].Evictions, 1)
	to.Abort(nil)
	f.checkUsed()
}

// TestQuotaLeaves: a tenant at its quota gets room in the near root although that is not full: its entries leave, and
// no more than the first is lost.
func TestQuotaLeaves(t *testing.T) {
	f := twoLevels(t, 64, 256, func(c *Config) { c.Quotas = []Quota{{First: 7, Last: 7, Bytes: 40 * pieceBytes}} })
	last := 0
	for n := range uint64(40) {
		must(t, f.putOf(7, n))
		f.settle()
		if f.rootOf(n) == 0 {
			last = int(n)
		}
	}
	if last < 38 {
		t.Errorf("the last entry of the tenant in the near root is %d of 40", last)
	}
	d := f.moved(1, moves.Demotion)
	equal(t, "entries that went without a copy", d.Shed.Load() <= 1, true) // the first one, for which none had left ahead
	equal(t, "entries that were copied or not wanted", d.Done.Load()+d.Refused.Load() > 25, true)
	f.checkUsed()
}

// picky is an admit policy that lets nothing move, and remembers what it was asked.
type picky struct{ asked map[abi.CandidateKind]int }

func (p picky) Admit(batch []abi.Candidate, dst []bool) {
	for i, c := range batch {
		p.asked[c.Kind]++
		dst[i] = c.Kind == abi.KindNew
	}
}

// TestAdmitsMoves: an admit policy decides what moves to the levels that it is given, and the built-in rule what moves to
// the others.
func TestAdmitsMoves(t *testing.T) {
	for _, c := range []struct {
		levels                uint8
		demotions, promotions bool // asked for
	}{{0, false, false}, {1, false, true}, {2, true, false}, {3, true, true}} {
		p := picky{map[abi.CandidateKind]int{}}
		h := handle(policy.NativeModule("picky", []abi.Role{abi.RoleAdmit}, func(guest.Info) (any, error) { return p, nil }))
		h.Levels = c.levels
		f := twoLevels(t, 16, 256, func(cfg *Config) { cfg.Policies.Admit = h })
		for n := range uint64(40) {
			f.mustPut(n)
			f.settle()
		}
		if !c.demotions {
			f.mustRead(0, 0)
			f.settle()
		}
		must(t, f.store.Close())
		equal(t, "demotions that the policy was asked about", p.asked[abi.KindDemotion] > 20, c.demotions)
		equal(t, "demotions made", f.moved(1, moves.Demotion).Done.Load() > 20, !c.demotions)
		if !c.demotions {
			equal(t, "promotions that the policy was asked about", p.asked[abi.KindPromotion] > 0, c.promotions)
			equal(t, "promotions made", f.moved(0, moves.Promotion).Done.Load() > 0, !c.promotions)
		}
	}
}

// ends is an admit policy that keeps new ends of prompts out of the far level. It remembers what it was asked about new ones.
type ends struct{ asked []abi.Candidate }

func (p *ends) Admit(batch []abi.Candidate, dst []bool) {
	for i, c := range batch {
		if c.Kind == abi.KindNew {
			p.asked = append(p.asked, c)
		}
		dst[i] = c.Kind != abi.KindNew || c.To == 0 || c.Flags&abi.CandidateContinued != 0
	}
}

// gate is a move that keeps the only worker until it is opened.
type gate struct{ shut, runs chan struct{} }

func (g gate) Bytes() int64 { return 0 }
func (g gate) Level() int   { return 1 }
func (g gate) Run(context.Context, *moves.Copier) bool {
	close(g.runs)
	<-g.shut
	return false
}
func (g gate) Shed()           {}
func (g gate) Value() float64  { return 1 }
func (g gate) Cancelled() bool { return false }

// farAway is a store of one prefix of 64 chunks, of which all but the last 16 are in the far level only. Its mover has
// one worker.
func farAway(t *testing.T) *fixture {
	t.Helper()
	f := twoLevels(t, 16, 256, func(c *Config) {
		c.UpkeepEvery = time.Hour
		c.Moves.Workers, c.Moves.Waiting = 1, time.Minute
	})
	for n := range uint64(64) {
		f.mustPut(n)
		f.settle()
	}
	return f
}

// shut keeps moves from being run until the gate is opened. The gate has the worker when it returns: else that may take another move first.
func (f *fixture) shut() (open func()) {
	f.Helper()
	g := gate{make(chan struct{}), make(chan struct{})}
	open = sync.OnceFunc(func() { close(g.shut) })
	f.Cleanup(open)
	if !f.store.mover.Offer(g) {
		f.Fatal("the mover takes nothing")
	}
	<-g.runs
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

// TestLookupAgainKeepsItsPrefetch: a lookup that is made again, as after a peer was asked, gets the copies that the first one asked for.
func TestLookupAgainKeepsItsPrefetch(t *testing.T) {
	f := farAway(t)
	open := f.shut()
	q := LookupRequest{Namespace: f.space, Keys: keys(0, 1), Prefetch: true, After: f.prefetch(0, 1)}
	l, err := f.store.Lookup(q)
	must(t, err)
	open()
	f.settle()
	for i := range 2 {
		equal(t, "level of a hit that was asked for", f.levelOf(l, i), 0)
	}
	l.Release()
	f.settle()
	for _, r := range f.store.roots {
		_, inUse := r.Census()
		equal(t, "entries in use", inUse, 0)
	}
}

// TestLoadBeforeItsPrefetch: a load takes what is there at once, and never waits for a copy. What it has loaded from
// farther away is not copied for it any more; the other is, and is loaded from near.
func TestLoadBeforeItsPrefetch(t *testing.T) {
	f := farAway(t)
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
	f := farAway(t)
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
	f.settle()
	f.checkUsed()
}

// TestPrefetchOfAnother: a copy that came for one lease is loaded by every other one.
func TestPrefetchOfAnother(t *testing.T) {
	f := farAway(t)
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
	f := farAway(t)
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

// TestPrefetchThatCannotBe: where the near level is out of service a load is served from the far one.
func TestPrefetchThatCannotBe(t *testing.T) {
	f := farAway(t)
	f.takeOut(0)
	l := f.prefetch(0, 1)
	f.settle()
	p := f.moved(0, moves.Prefetch)
	equal(t, "copies that failed", p.Failed.Load(), 2)
	f.openIn(l, 0, 1)
	l.Release()
	f.settle()

	f = farAway(t)
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
