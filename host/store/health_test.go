package store

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvhost/kvhost/host/store/health"
	"github.com/kvhost/kvhost/host/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
	"github.com/kvhost/kvhost/staging/faultfs"
	"golang.org/x/sys/unix"
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
	for deadline := time.Now().Add(20 * time.Second); f.store.Stats().Roots[root].State != want; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			f.Fatalf("root %d is %+v, want it %s", root, f.store.Stats().Roots[root], want)
		}
	}
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
	f = newFixture(t, filepath.Join(base, "good"), entries, 1, append([]func(*Config){func(c *Config) {
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

// TestHungRoot hangs one of two roots at each kind of operation. Nobody waits longer than the limit, the other root
// goes on, and when the hanging ends the root is back, with its entries but for those whose files gave no answer.
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
			faulty.Set(faultfs.MustRules(fmt.Sprintf("%s %s/**: hang", c.op, dir))...)
			f.limitIO(1, shortIO)
			if err := c.use(f, bad[0]); !errors.Is(err, staging.ErrHung) {
				t.Fatalf("the error is %v", err)
			}
			f.awaitState(1, health.Out)
			st := f.store.Stats().Roots[1]
			if st.Stuck == 0 || st.Outages != 1 || !strings.Contains(st.Reason, "no answer") || st.Since.IsZero() {
				t.Errorf("%+v", st)
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
			for _, n := range good {
				f.mustRead(n)
			}
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
			for _, n := range good {
				f.mustRead(n)
			}
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
	select {
	case <-done:
	case <-time.After(20 * time.Second):
		t.Fatal("Close waits for a root that hangs")
	}
	faulty.Set()
	f.start()
	f.mustRead(0)
	f.mustRead(2)
	f.checkUsed()
}

// TestRootFails has one of two roots fail again and again, then come back.
func TestRootFails(t *testing.T) { synctest.Test(t, testRootFails) }

func testRootFails(t *testing.T) {
	f, faulty, dir := twoRoots(t, 200)
	bad, good := f.spread(40)
	faulty.Set(faultfs.MustRules(fmt.Sprintf("any %s/**: eio", dir))...)
	for _, n := range bad {
		if err := f.openOne(n); err == nil {
			t.Errorf("key %d opens", n)
		}
	}
	f.awaitState(1, health.Out)
	if got := f.store.Stats().Roots[1]; !strings.Contains(got.Reason, "input/output error") {
		t.Errorf("%+v", got)
	}
	for n := uint64(1000); n < 1020; n++ {
		f.mustPut(n)
	}
	faulty.Set()
	f.awaitState(1, health.In)
	for _, n := range good {
		f.mustRead(n)
	}
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
	f, faulty, dir := twoRoots(t, 200)
	bad, _ := f.spread(20)
	faulty.Set(faultfs.MustRules(fmt.Sprintf("open %s/**.tmp: erofs\nwrite,publish,rename,remove,mkdir %s/**: erofs", dir, dir))...)
	if err := f.putsUntilError(100); !errors.Is(err, unix.EROFS) {
		t.Fatal(err)
	}
	f.awaitState(1, health.ReadOnly)
	for n := uint64(1000); n < 1020; n++ {
		f.mustPut(n)
	}
	for _, n := range bad {
		f.mustRead(n)
	}
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
	if err := os.Mkdir(root, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", root, "tmpfs", 0, "size=4m"); err != nil {
		t.Skipf("missing: the right to mount (%v): run as root with CAP_SYS_ADMIN", err)
	}
	t.Cleanup(func() { unix.Unmount(root, unix.MNT_DETACH) })
	f := newFixture(t, root, 10, 1, func(c *Config) { c.UpkeepEvery = 5 * time.Millisecond })
	f.mustPut(0, 1)
	if err := unix.Unmount(root, unix.MNT_DETACH); err != nil {
		t.Fatal(err)
	}
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

// TestTemporariesOfMeta leaves some beside the store's own files.
func TestTemporariesOfMeta(t *testing.T) {
	dir := t.TempDir()
	f := newFixture(t, dir, 4, 1)
	f.mustPut(0)
	mine := func(d string) string { return pieceformat.TempName(filepath.Join(dir, d, "x"), "testhost", 7) }
	others := pieceformat.TempName(filepath.Join(dir, pieceformat.MetaDir, "x"), "otherhost", 7)
	for _, shared := range []bool{true, false} {
		f.store.Close()
		for _, name := range []string{mine(pieceformat.MetaDir), mine(pieceformat.NamespacesDir), mine(pieceformat.PlansDir), others} {
			put(t, name, []byte("left"))
		}
		f.cfg.Roots[0].Shared = shared
		f.start()
		for _, name := range []string{mine(pieceformat.MetaDir), mine(pieceformat.NamespacesDir), mine(pieceformat.PlansDir)} {
			if _, err := os.Stat(name); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("shared %t: %s: %v", shared, name, err)
			}
		}
		if _, err := os.Stat(others); (err == nil) != shared {
			t.Errorf("shared %t: another host's: %v", shared, err)
		}
	}
}

// TestStraysGo: what would not be unlinked is tried again, and its bytes are free then.
func TestStraysGo(t *testing.T) {
	f, faulty := faultyFixture(t, 4, func(c *Config) { c.QuarantineFiles = -1 })
	f.unlinkVictims()
	f.mustPut(0, 1, 2, 3)
	faulty.Set(faultfs.MustRules("remove **: eacces\nstat **.kv: eacces")...)
	if err := f.put(4, 0); !errors.Is(err, ErrNoSpace) {
		t.Error(err)
	}
	if got := f.store.Stats().Roots[0]; got.Orphaned != pieceBytes {
		t.Errorf("%d bytes of orphans, and nobody could say that the file is gone", got.Orphaned)
	}
	faulty.Set()
	f.store.roots[0].Orphans.Retry(context.Background())
	if got := f.store.Stats().Roots[0]; got.Orphaned != 0 || got.Used != 3*pieceBytes {
		t.Errorf("%+v", got)
	}
	f.checkUsed()

	// One that is stored again is no orphan any more.
	faulty.Set(faultfs.MustRules("remove **: eacces")...)
	l := f.lookup(1)
	p, err := l.Open(0, 0)
	if err != nil {
		t.Fatal(err)
	}
	p.Bad(errors.New("on purpose"))
	p.Close()
	l.Release()
	faulty.Set()
	f.mustPut(1)
	f.store.roots[0].Orphans.Retry(context.Background())
	f.mustRead(1)
	if got := f.store.Stats().Roots[0]; got.Orphaned != 0 {
		t.Errorf("%+v", got)
	}
	f.checkUsed()
}

// TestWaitingEndsWithTheContext lets puts wait for the turn and for a key's stripe.
func TestWaitingEndsWithTheContext(t *testing.T) {
	f := newFixture(t, t.TempDir(), 4, 1)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	r := f.store.roots[0]
	_ = r.turn.Acquire(context.Background(), 1)
	if _, err := f.store.Put(ctx, f.request(1, 0, 0)); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	r.turn.Release(1)
	for _, stripe := range f.store.stripes {
		_ = stripe.Acquire(context.Background(), 1)
	}
	if _, err := f.store.Put(ctx, f.request(1, 0, 0)); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	for _, stripe := range f.store.stripes {
		stripe.Release(1)
	}
	f.mustPut(1)
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
