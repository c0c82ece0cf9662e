package store

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
	"github.com/kvhost/kvhost/staging"
)

// backIn lets every root that is not in come back, which must work at once.
func (f *fixture) backIn() {
	f.Helper()
	for _, r := range f.store.roots {
		if state := r.Health.State(); state > health.Full {
			if err := r.Health.Reopen(context.Background(), (returning{r})); err != nil || r.Health.State() != health.In {
				f.Fatalf("root %s is %s: %v", r.Path, r.Health.State(), err)
			}
		}
	}
}

// awaitState waits for a root to be in a state.
func (f *fixture) awaitState(root int, want health.State) {
	f.Helper()
	testenv.Until(f, fmt.Sprintf("root %d is %s", root, want), func() bool { return f.store.Stats().Roots[root].State == want },
		func() any { return f.store.Stats().Roots[root] })
}

// longIO is more than anything that does not hang takes on a busy machine; shortIO is for roots in which everything
// does.
const (
	longIO  = time.Minute
	shortIO = 200 * time.Millisecond
)

// limitIO is how long operations on a root may take from now on.
func (f *fixture) limitIO(root int, d time.Duration) {
	r := f.store.roots[root]
	r.Health.FS().SetLimit(d)
	r.Health.Bare().SetLimit(d)
}

// twoRoots is a fixture whose second root fails as rules say; entries are spread over both.
func twoRoots(t *testing.T, entries int, change ...func(*Config)) (f *fixture, faulty *faultfs.FS, bad string) {
	base := t.TempDir()
	bad = filepath.Join(base, "bad")
	faulty = faultfs.New(staging.OS())
	t.Cleanup(faulty.Release)
	f = newFixtureIn(t, filepath.Join(base, "good"), entries, 1, append([]func(*Config){func(c *Config) {
		c.Roots = append(c.Roots, RootConfig{Path: bad, Capacity: c.Roots[0].Capacity, MaxEntries: c.Roots[0].MaxEntries})
		c.FS, c.IOTimeout, c.UpkeepEvery = faulty, longIO, 5*time.Millisecond
	}}, change...)...)
	return f, faulty, bad
}

// spread stores so many keys and says which are in the second root.
func (f *fixture) spread(n uint64) (bad, good []uint64) {
	f.Helper()
	for k := range n {
		f.mustPut(k)
		if _, err := os.Stat(f.pieceFile(k, 0)); err == nil {
			good = append(good, k)
		} else {
			bad = append(bad, k)
		}
	}
	if len(bad) < 3 || len(good) < 3 {
		f.Fatalf("%d and %d keys in the roots", len(good), len(bad))
	}
	return bad, good
}

// TestHungRoot hangs one of two roots at each kind of operation. Nobody waits longer than the limit, and the other root
// works. When the hanging ends the root is back, with its entries except those whose files gave no answer.
func TestHungRoot(t *testing.T) {
	for _, c := range []struct {
		op  string
		use func(f *fixture, bad uint64) error
	}{
		{"open", func(f *fixture, bad uint64) error { return f.openOne(bad) }},
		{"stat", func(f *fixture, bad uint64) error { return f.openOne(bad) }},
		{"write", func(f *fixture, _ uint64) error { return f.putsUntilError(100) }},
		{"publish", func(f *fixture, _ uint64) error { return f.putsUntilError(100) }},
		{"close", func(f *fixture, _ uint64) error { return f.putsUntilError(100) }},
		{"any", func(f *fixture, _ uint64) error { return f.putsUntilError(100) }},
	} {
		synctestRun(t, c.op, func(t *testing.T) {
			f, faulty, dir := twoRoots(t, 200)
			bad, good := f.spread(20)
			faulty.Set(faultfs.MustRules(c.op + " **/bad/**: hang")...)
			f.limitIO(1, shortIO)
			if err := c.use(f, bad[0]); !errors.Is(err, staging.ErrHung) {
				t.Fatalf("the error is %v", err)
			}
			f.awaitState(1, health.Out)
			st := f.store.Stats().Roots[1]
			if st.Stuck == 0 || st.Outages != 1 || !strings.Contains(st.Reason, "no answer") || st.Since.IsZero() {
				t.Errorf("a root that hangs: %+v, want one outage for no answer, and an operation that is stuck", st)
			}
			for _, n := range bad {
				if f.has(n) {
					t.Errorf("key %d is a hit in a root that hangs", n)
				}
			}
			for n := uint64(1000); n < 1020; n++ { // all of them go to the root that is in
				f.mustPut(n)
				f.mustRead(n)
			}
			f.mustRead(good...)
			other := testNamespace(1)
			other.Revision = "opened meanwhile"
			if _, err := f.store.Namespace(context.Background(), other); err != nil {
				t.Error(err)
			}
			f.mustPut(bad[1]) // elsewhere
			f.mustRead(bad[1])

			f.limitIO(1, longIO)
			faulty.Release()
			f.awaitState(1, health.In)
			if got := f.store.Stats().Roots[1].Stuck; got != 0 {
				t.Errorf("%d operations are stuck", got)
			}
			missing := 0
			for _, n := range bad {
				if f.has(n) {
					f.mustRead(n)
				} else {
					missing++
				}
			}
			if missing > 1 {
				t.Errorf("%d of %d entries are lost for one operation that hung", missing, len(bad))
			}
			if _, err := os.Stat(filepath.Join(dir, pieceformat.NamespacesDir, other.Digest().String())); err != nil {
				t.Errorf("a namespace that was opened while the root was out: %v", err)
			}
			f.checkUsed()
			f.restart()
			f.mustRead(good...)
			if got := f.store.Stats().Roots[1]; got.Swept != 0 {
				t.Errorf("%d temporaries were left", got.Swept)
			}
		})
	}
}

// synctestRun runs a subtest whose clock is the bubble's: a second passes when everything waits.
func synctestRun(t *testing.T, name string, test func(*testing.T)) {
	t.Helper()
	t.Run(name, func(t *testing.T) { synctest.Test(t, test) })
}

func (f *fixture) openOne(n uint64) error {
	l := f.lookup(n)
	defer l.Release()
	p, err := l.Open(0, 0)
	if err == nil {
		p.Close()
	}
	return err
}

// putsUntilError stores keys from n on until one fails.
func (f *fixture) putsUntilError(n uint64) error {
	for k := n; k < n+50; k++ {
		if err := f.put(k, 0); err != nil {
			return err
		}
	}
	return nil
}

// TestLoneRootHangs: with no other root, stores fail by name and lookups miss until it answers again. Close does not
// wait for it.
func TestLoneRootHangs(t *testing.T) { synctest.Test(t, testLoneRootHangs) }

func testLoneRootHangs(t *testing.T) {
	f, faulty := faultyFixture(t, 10, func(c *Config) { c.IOTimeout, c.UpkeepEvery = longIO, 5*time.Millisecond })
	t.Cleanup(faulty.Release)
	f.mustPut(0, 1)
	faulty.Set(faultfs.MustRules("any **: hang")...)
	f.limitIO(0, shortIO)
	if err := f.put(2, 0); !errors.Is(err, staging.ErrHung) {
		t.Error(err)
	}
	if err := f.put(3, 0); !errors.Is(err, ErrRootOut) || !strings.Contains(err.Error(), "no answer") {
		t.Error(err)
	}
	if f.has(0) {
		t.Error("a hit in a root that hangs")
	}
	f.limitIO(0, longIO)
	faulty.Release()
	f.awaitState(0, health.In)
	f.mustRead(0)
	f.mustPut(2)
	faulty.Set(faultfs.MustRules("any **: hang")...)
	f.limitIO(0, shortIO)
	if err := f.put(3, 0); !errors.Is(err, staging.ErrHung) {
		t.Error(err)
	}
	done := make(chan struct{})
	go func() { f.store.Close(); close(done) }()
	testenv.Receive(t, "the end of Close beside a root that hangs", done)
	faulty.Set()
	f.start()
	f.mustRead(0, 2)
	f.checkUsed()
}

// TestRootFails has one of two roots fail again and again, then come back.
func TestRootFails(t *testing.T) { synctest.Test(t, testRootFails) }

func testRootFails(t *testing.T) {
	f, faulty, _ := twoRoots(t, 200)
	bad, good := f.spread(40)
	faulty.Set(faultfs.MustRules("any **/bad/**: eio")...)
	for _, n := range bad {
		if err := f.openOne(n); err == nil {
			t.Errorf("key %d opens", n)
		}
	}
	f.awaitState(1, health.Out)
	if got := f.store.Stats().Roots[1]; !strings.Contains(got.Reason, "input/output error") {
		t.Errorf("a root with I/O errors is out because of %q, want the error", got.Reason)
	}
	for n := uint64(1000); n < 1020; n++ {
		f.mustPut(n)
	}
	faulty.Set()
	f.awaitState(1, health.In)
	f.mustRead(good...)
	kept := 0
	for _, n := range bad {
		if f.has(n) {
			f.mustRead(n)
			kept++
		}
	}
	if kept < len(bad)-2*8 {
		t.Errorf("%d of %d entries are left", kept, len(bad))
	}
	f.checkUsed()
}

// TestRootTurnsReadOnly: its entries are read, and stores go elsewhere.
func TestRootTurnsReadOnly(t *testing.T) { synctest.Test(t, testRootTurnsReadOnly) }

func testRootTurnsReadOnly(t *testing.T) {
	f, faulty, _ := twoRoots(t, 200)
	bad, _ := f.spread(20)
	faulty.Set(faultfs.MustRules("open **/bad/**.tmp: erofs\nwrite,publish,rename,remove,mkdir **/bad/**: erofs")...)
	if err := f.putsUntilError(100); !errors.Is(err, unix.EROFS) {
		t.Fatal(err)
	}
	f.awaitState(1, health.ReadOnly)
	for n := uint64(1000); n < 1020; n++ {
		f.mustPut(n)
	}
	f.mustRead(bad...)
	facts := f.store.roots[1].facts(1)
	if facts.Flags != 0 {
		t.Errorf("the place policy is told %+v", facts)
	}
	faulty.Set()
	f.awaitState(1, health.In)
	f.checkUsed()
}

// TestAnotherFileSystemAtTheRoot takes a mount away: what is under it must not be filled.
func TestAnotherFileSystemAtTheRoot(t *testing.T) { synctest.Test(t, testAnotherFileSystemAtTheRoot) }

func testAnotherFileSystemAtTheRoot(t *testing.T) {
	base := t.TempDir()
	root := filepath.Join(base, "root")
	must(t, os.Mkdir(root, 0o700))
	if err := unix.Mount("tmpfs", root, "tmpfs", 0, "size=4m"); err != nil {
		t.Skipf("missing: the right to mount (%v): run as root with CAP_SYS_ADMIN", err)
	}
	t.Cleanup(func() { unix.Unmount(root, unix.MNT_DETACH) })
	f := newFixtureIn(t, root, 10, 1, func(c *Config) { c.UpkeepEvery = 5 * time.Millisecond })
	f.mustPut(0, 1)
	must(t, unix.Unmount(root, unix.MNT_DETACH))
	f.awaitState(0, health.Out)
	if f.has(0) {
		t.Error("a hit where nothing is mounted")
	}
	if err := f.put(2, 0); !errors.Is(err, ErrRootOut) {
		t.Error(err)
	}
	time.Sleep(50 * time.Millisecond) // some probes
	if list, err := os.ReadDir(root); err != nil || len(list) > 0 {
		t.Errorf("%v, %v under the mount point", list, err)
	}
	f.store.Close()
}

// With two roots the place policy hears how fast each is.
func TestRootsSpeedsReachThePlacePolicy(t *testing.T) {
	dir := t.TempDir()
	f := newFixtureIn(t, filepath.Join(dir, "a"), 20, 1, func(c *Config) {
		second := c.Roots[0]
		second.Path = filepath.Join(dir, "b")
		c.Roots = append(c.Roots, second)
	})
	f.mustPut(upTo(20)...)
	for i, r := range f.store.roots {
		if facts := r.facts(i); facts.WriteBps == 0 {
			t.Errorf("root %d: nobody measured its writes", i)
		}
	}
}

// TestOneRootCannotBeOpened starts while a file stands in the place of one of two roots. The other serves; when the
// directory is there again, so does that one, with what it had.
func TestOneRootCannotBeOpened(t *testing.T) {
	for _, how := range []string{"checkpoint", "scan"} {
		t.Run(how, func(t *testing.T) {
			second := filepath.Join(t.TempDir(), "second")
			f := newFixture(t, 40, 1, func(c *Config) {
				c.UpkeepEvery = time.Millisecond
				c.Roots = append(c.Roots, c.Roots[0])
				c.Roots[1].Path = second
			})
			var there []uint64 // in the second root
			for n := range uint64(20) {
				f.mustPut(n)
				l := f.lookup(n)
				if l.grants[0].Root == 1 {
					there = append(there, n)
				}
				l.Release()
			}
			if len(there) == 0 || len(there) == 20 {
				t.Fatalf("%d of 20 are in the second root", len(there))
			}
			must(t, f.store.Close())
			if how == "scan" {
				must(t, os.Remove(filepath.Join(second, pieceformat.CheckpointFile)))
			}
			must(t, os.Rename(second, second+".gone"))
			put(t, second, nil)
			f.cfg.ScanWait = -1
			f.open()
			if st := f.store.Stats().Roots[1]; st.State != health.Out {
				t.Fatalf("the second root is %s", st.State)
			}
			for n := range uint64(20) {
				if away := slices.Contains(there, n); f.has(n) == away {
					t.Errorf("key %d: a hit is %t, in the second root is %t", n, !away, away)
				}
			}
			f.discards(there[:1], DiscardUnavailable)
			f.mustPut(100)
			// At once: a root that is not there is made.
			must(t, unix.Renameat2(unix.AT_FDCWD, second+".gone", unix.AT_FDCWD, second, unix.RENAME_EXCHANGE))
			await(t, "the second root is opened", func() bool { return f.store.Stats().Roots[1].State == health.In })
			<-f.store.ScanDone()
			f.mustRead(upTo(20)...)
			f.mustRead(100)
			if st := f.store.Stats().Roots[1]; (st.Scanned == 0) != (how == "checkpoint") {
				t.Errorf("%d files were scanned", st.Scanned)
			}
			f.restart()
			f.mustRead(upTo(20)...)
		})
	}
}

// TestRootIsMadeLate: the directory of a root whose disk was not there at the start is made when it is, by a host whose addresses are taken: by
// itself.
func TestRootIsMadeLate(t *testing.T) {
	disk := filepath.Join(t.TempDir(), "disk")
	var taken atomic.Bool
	f := newFixture(t, 40, 1)
	must(t, f.store.Close())
	f.cfg.UpkeepEvery, f.cfg.ScanWait = time.Millisecond, -1
	f.cfg.Roots = append(f.cfg.Roots, f.cfg.Roots[0])
	f.cfg.Roots[1].Path = filepath.Join(disk, "kv")
	f.cfg.Making = func() error {
		if taken.Load() {
			return unix.EADDRINUSE
		}
		return nil
	}
	f.open()
	equal(t, "a root without a disk", f.store.Stats().Roots[1].State, health.Out)
	taken.Store(true)
	must(t, os.Mkdir(disk, 0o700))
	await(t, "the root is made", func() bool { return f.store.Stats().Roots[1].State == health.In })
}

// TestNoRootCanBeOpened: then there is nothing to serve with.
func TestNoRootCanBeOpened(t *testing.T) {
	dir := t.TempDir()
	f := newFixtureIn(t, dir, 4, 1)
	must(t, f.store.Close())
	c := f.cfg
	c.Roots = append(slices.Clone(c.Roots), c.Roots[0])
	for i := range c.Roots {
		c.Roots[i].Path = filepath.Join(dir, string(rune('a'+i)))
		put(t, c.Roots[i].Path, nil)
	}
	if s, err := Open(t.Context(), c); err == nil {
		s.Close()
		t.Fatal("it was opened")
	} else if !errors.Is(err, fs.ErrExist) && !strings.Contains(err.Error(), "not a directory") {
		t.Error(err)
	}
}

// lockLosses are ways to take the lock of a running host away.
var lockLosses = map[string]func(dir string) error{
	"the lock file": func(dir string) error { return os.Remove(filepath.Join(dir, pieceformat.LockFile)) },
	"another lock file": func(dir string) error {
		name := filepath.Join(dir, pieceformat.LockFile)
		return errors.Join(os.Remove(name), os.WriteFile(name, nil, 0o600))
	},
	"its directory": func(dir string) error { return os.RemoveAll(filepath.Join(dir, pieceformat.MetaDir)) },
	"its directory, renamed": func(dir string) error {
		return os.Rename(filepath.Join(dir, pieceformat.MetaDir), dir+".away")
	},
	"its directory, a link now": func(dir string) error {
		meta, away := filepath.Join(dir, pieceformat.MetaDir), filepath.Join(filepath.Dir(dir), "away")
		return errors.Join(os.Rename(meta, away), os.Symlink(away, meta))
	},
}

// TestLockIsLost takes the lock of a running host away. The host notices, no other host can start meanwhile, and what
// was stored is there afterwards, whether the host comes back by itself or is killed before.
func TestLockIsLost(t *testing.T) {
	for name, lose := range lockLosses {
		for _, killed := range []bool{false, true} {
			t.Run(name+map[bool]string{true: ", killed"}[killed], func(t *testing.T) {
				f := newFixtureIn(t, filepath.Join(t.TempDir(), "root"), 40, 1, func(c *Config) { c.UpkeepEvery = time.Hour })
				f.mustPut(0, 1, 2)
				r := f.root()
				must(t, lose(r.Path))
				f.mustPut(3)
				if other, err := Open(context.Background(), f.cfg); !errors.Is(err, ErrRootBusy) {
					if err == nil {
						other.Close()
					}
					t.Fatalf("another host starts: %v", err)
				}
				if killed {
					f.kill()
					f.start()
				} else {
					if err := f.store.Maintain(t.Context(), 0, Probe); err != nil || r.Health.State() != health.Out {
						t.Fatalf("the root is %s, %v", r.Health.State(), err)
					}
					f.backIn()
					if other, err := Open(context.Background(), f.cfg); !errors.Is(err, ErrRootBusy) {
						if err == nil {
							other.Close()
						}
						t.Fatalf("another host starts later: %v", err)
					}
				}
				f.mustRead(upTo(4)...)
				f.mustPut(4)
				f.checkUsed()
				f.restart()
				f.mustRead(upTo(5)...)
			})
		}
	}
}

// TestLostLockIsNoticed: the root's own upkeep notices it within a second.
func TestLostLockIsNoticed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, 40, 1, func(c *Config) { c.Now = time.Now })
		defer f.store.Close()
		f.mustPut(0)
		must(t, lockLosses["its directory"](f.cfg.Roots[0].Path))
		time.Sleep(time.Second)
		synctest.Wait()
		if f.store.Stats().Roots[0].Outages == 0 {
			t.Fatal("not noticed in a second")
		}
		f.awaitState(0, health.In)
		f.mustRead(0)
	})
}

// leaving is a file system in which a root's directory is moved away just before its lock file is looked at.
type leaving struct {
	staging.FS
	root string
	left atomic.Bool
}

func (f *leaving) Stat(name string) (staging.Info, error) {
	if f.left.Load() && filepath.Base(name) == filepath.Base(pieceformat.LockFile) {
		if err := os.Rename(f.root, f.root+".away"); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return staging.Info{}, err
		}
	}
	return f.FS.Stat(name)
}

// TestDirectoryGoesMeanwhile: where the lock file is missing because the whole directory is, the report says so.
func TestDirectoryGoesMeanwhile(t *testing.T) {
	root := filepath.Join(t.TempDir(), "root")
	fsys := &leaving{FS: staging.OS(), root: root}
	f := newFixtureIn(t, root, 40, 1, func(c *Config) { c.FS, c.UpkeepEvery = fsys, time.Hour })
	fsys.left.Store(true)
	must(t, f.store.Maintain(t.Context(), 0, Probe))
	if said := f.root().Health.Report().Reason; !strings.HasPrefix(said, "its directory is gone") {
		t.Errorf("the root is out because %s", said)
	}
}
