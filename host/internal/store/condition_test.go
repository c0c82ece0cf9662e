package store

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
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

// conditions are those that pass, one errno of each sort.
var conditions = []unix.Errno{unix.EMFILE, unix.ENOSPC, unix.EIO, unix.ESTALE, unix.EACCES}

// TestAFileOrItsRoot: a file that cannot be read goes with its entry, so that it fails one load and no more. Where none of the
// root's can be, or the process is short of something, every entry is as it was when that is over.
func TestAFileOrItsRoot(t *testing.T) {
	for _, c := range []struct {
		what, rule string
		alone      bool // it is the file's own fault
	}{
		{"a file of mode 0", "open **/FILE: eacces", true},
		{"a bad file", "open **/FILE: eio", true},
		{"a bad page", "read **/FILE: eio", true},
		{"a stale name", "open **/FILE: estale", true},
		{"a file that fails once", "open **/FILE 1st: eio", false},
		{"a page that fails once", "read **/FILE 1st: eio", false},
		{"an error that ends as others are asked", "read **/FILE 1st: eio\nread **/FILE 2nd: eio", false},
		{"a root without rights", "open **: eacces", false},
		{"a root without rights to pieces", "open **.kv: eperm", false},
		{"a device without an answer", "open,read,stat **: eio", false},
		{"a file system whose process has ended", "open **: econnaborted", false},
		{"a server that is away", "open **: ehostunreach", false},
		{"no descriptors", "open **: emfile", false},
		{"no memory", "open **: enomem", false},
	} {
		for _, others := range []int{0, 8} {
			if others == 0 && strings.Contains(c.what, "to pieces") {
				continue // nothing tells the one piece from all
			}
			t.Run(fmt.Sprintf("%s/%d others", c.what, others), func(t *testing.T) {
				f, faulty := faultyFixture(t, 40, func(c *Config) { c.UpkeepEvery = time.Hour })
				f.mustPut(upTo(others + 1)...)
				rule := strings.ReplaceAll(c.rule, "FILE", filepath.Base(f.pieceFile(0, 0)))
				faulty.Set(faultfs.MustRules(rule)...)
				if err := f.load(0); err == nil {
					t.Error("the load of a file that fails succeeded")
				}
				if c.alone && f.has(0) {
					t.Error("a file that fails by itself is a hit after its load failed, want a miss")
				}
				faulty.Set()
				f.backIn()
				for n := range uint64(others + 1) {
					equal(t, fmt.Sprintf("key %d is a hit", n), f.has(n), n > 0 || !c.alone)
				}
				f.checkUsed()
			})
		}
	}
}

// load reads a piece through its open file, and says what is bad about it, as an engine does.
func (f *fixture) load(n uint64) error {
	l := f.lookup(n)
	defer l.Release()
	if l.Hits() == 0 {
		return errMiss
	}
	p, err := l.Open(0, 0)
	if err != nil {
		return err
	}
	defer p.Close()
	image := make([]byte, p.Size())
	if _, err = p.File().ReadAt(image, 0); err == nil {
		_, err = p.Verify(image)
	}
	if err != nil {
		p.Bad(err)
	}
	return err
}

var errMiss = errors.New("a miss")

// TestConditionsPass has each condition begin at every call of a store's work on files, and last for one call or until all is
// done. Five seconds after its end, without help, all that was stored is a hit, the account is the disk's, and stores and
// loads work. A store that needs room may have cost the entry that it replaces.
func TestConditionsPass(t *testing.T) {
	testenv.Slow(t)
	for name, change := range stores {
		for i, errno := range conditions {
			for j, lasts := range []bool{false, true} {
				if name != "one root" && (!lasts || errno != unix.EIO && errno != unix.ENOSPC) {
					continue // the rest has no more to find, and takes minutes
				}
				t.Run(fmt.Sprintf("%s/%v/lasts=%t", name, errno, lasts), func(t *testing.T) {
					t.Parallel()
					calls, first := 0, (i+j)%2 // half of the conditions strike every other call, and half those between
					for struck := true; struck && !t.Failed(); calls++ {
						at := uint64(first + 2*calls + 1)
						when := faultfs.When{Nth: at}
						if lasts {
							when = faultfs.When{First: at}
						}
						rule := faultfs.Rule{Op: staging.OpAny, Path: "**", When: when, Fault: faultfs.Fault{Errno: errno}}
						synctest.Test(t, func(t *testing.T) { struck = conditionAt(t, change, rule) })
					}
					if calls < 20 {
						t.Errorf("%d calls were tried, want all of a store's work", calls)
					}
				})
			}
		}
	}
}

// stores are sorts of stores, by what they have in common.
var stores = map[string]func(*Config){
	"one root": func(*Config) {},
	"strict":   func(c *Config) { c.Strict, c.Roots[0].DailyWrites = true, 1<<30 },
	"two levels": func(c *Config) {
		far := c.Roots[0]
		far.Path, far.Level, far.Capacity = far.Path+"/../far", 1, 64*pieceBytes
		c.Roots = append(c.Roots, far)
	},
	"shared": func(c *Config) {
		r := &c.Roots[0]
		r.Shared, r.Poll, r.Lapse, r.Capacity = true, 250*time.Millisecond, time.Minute, 60*pieceBytes
	},
}

// conditionAt has a rule strike a store's work, and says whether it did.
func conditionAt(t *testing.T, change func(*Config), rule faultfs.Rule) (struck bool) {
	const room = 4
	faulty := faultfs.New(staging.OS())
	f := newFixtureIn(t, filepath.Join(testenv.Dir(t), "root"), room, 1, func(c *Config) {
		c.FS, c.Now, c.IOTimeout = faulty, time.Now, -1
	}, change)
	defer func() { f.store.Close() }()
	when := fmt.Sprintf("%v at %+v", rule.Fault.Errno, rule.When)
	stored := map[uint64]bool{}
	put := func(n uint64) {
		if err := f.put(n, 0); err == nil {
			stored[n] = true
		}
	}
	for n := range uint64(room - 1) {
		put(n)
	}
	// With room, a load, a store, and a start that scans.
	faulty.Set(rule)
	_ = f.load(0)
	put(room - 1)
	struck = faulty.Injected() > 0
	f.passes(when+", with room", faulty)
	for n := range stored {
		if !f.has(n) {
			t.Errorf("%s, with room: key %d is a miss", when, n)
		}
	}
	put(room - 1)
	// Without room, a store, and what a start finds.
	faulty.Set(rule)
	put(room)
	struck = struck || faulty.Injected() > 0
	f.passes(when+", without room", faulty)
	before := f.hits(room + 1)
	if want := room - 1; len(before) < want {
		t.Errorf("%s, without room: %d hits, want at least %d", when, len(before), want)
	}
	must(t, f.store.Close())
	_ = os.Remove(filepath.Join(f.cfg.Roots[0].Path, pieceformat.CheckpointFile)) // if it was written
	faulty.Set(rule)
	s, err := Open(t.Context(), f.cfg)
	struck = struck || faulty.Injected() > 0
	faulty.Set()
	if err != nil { // as with a root that there is no other of
		s, err = Open(t.Context(), f.cfg)
		must(t, err)
	}
	f.store = s
	f.passes(when+", at a start", faulty)
	f.space, err = s.Namespace(t.Context(), f.ns)
	must(t, err)
	after := f.hits(room + 1)
	if len(after) < len(before) || len(after) < 3 {
		t.Fatalf("%s, at a start: keys %v are hits, want %v", when, after, before)
	}
	// A damaged piece, and one that is discarded.
	bad, rest := after[0], after[2:]
	near := filepath.Join(f.cfg.Roots[f.rootOf(bad)].Path, strings.TrimPrefix(f.pieceFile(bad, 0), f.cfg.Roots[0].Path))
	must(t, os.WriteFile(near, make([]byte, pieceBytes), 0o600))
	faulty.Set(rule)
	_ = f.load(bad)
	_, _ = f.store.Discard(DiscardRequest{Namespace: f.space, Keys: keys(after[1])})
	struck = struck || faulty.Injected() > 0
	f.passes(when+", with damage", faulty)
	if still := f.hits(room + 1); len(still) < len(rest) || !slices.Equal(still[len(still)-len(rest):], rest) {
		t.Errorf("%s, with damage of %d: keys %v are hits, want %v too", when, bad, still, rest)
	}
	return struck
}

// passes ends a condition. What must hold after five seconds is that stores and loads work, and the account is the disk's.
func (f *fixture) passes(when string, faulty *faultfs.FS) {
	f.Helper()
	faulty.Set()
	time.Sleep(5 * time.Second)
	synctest.Wait()
	<-f.store.ScanDone()
	st := f.store.Stats().Roots[0]
	if disk, _ := usage(f, f.cfg.Roots[0].Path); st.State > health.Full || st.Used != disk {
		f.Errorf("%s: the root is %s, its account says %d bytes and the disk %d", when, st.State, st.Used, disk)
	}
}

// hits are the keys below n that are hits, each of them loaded.
func (f *fixture) hits(n uint64) (list []uint64) {
	for k := range n {
		if f.load(k) == nil {
			list = append(list, k)
		}
	}
	return list
}

// TestRoomIsTriedSoon: a file system that was full for a moment takes stores again after a second. One that stays full is tried
// less and less often.
func TestRoomIsTriedSoon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, faulty := faultyFixture(t, 40, func(c *Config) { c.Now, c.IOTimeout = time.Now, -1 })
		defer f.store.Close()
		f.mustPut(0)
		full := func() {
			t.Helper()
			faulty.Set(faultfs.MustRules("write **.tmp: enospc")...)
			if err := f.put(1, 0); !errors.Is(err, unix.ENOSPC) {
				t.Errorf("put on a full file system: error %v, want %v", err, unix.ENOSPC)
			}
			faulty.Set()
		}
		state := func() health.State { synctest.Wait(); return f.store.Stats().Roots[0].State }
		for _, pause := range []time.Duration{1, 2, 4, 8, 16, 32, 64, 64} {
			full()
			time.Sleep(pause*time.Second - 100*time.Millisecond)
			equal(t, fmt.Sprintf("state before %d s", pause), state(), health.Full)
			time.Sleep(1200 * time.Millisecond)
			equal(t, fmt.Sprintf("state after %d s", pause), state(), health.In)
		}
		time.Sleep(2 * time.Minute)
		full()
		time.Sleep(2100 * time.Millisecond)
		equal(t, "state two seconds after room for long", state(), health.In)
		f.mustPut(1)
		f.mustRead(0, 1)
	})
}
