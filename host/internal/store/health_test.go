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

	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
	"github.com/kvhost/kvhost/staging/faultfs"
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
	deadline := time.Now().Add(time.Minute)
	for ; f.store.Stats().Roots[root].State != want; time.Sleep(time.Millisecond) {
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
	select {
	case <-done:
	case <-time.After(time.Minute):
		t.Fatal("Close waits for a root that hangs")
	}
	faulty.Set()
	f.start()
	f.mustRead(0, 2)
	f.checkUsed()
}
