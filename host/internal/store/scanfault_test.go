package store

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging/faultfs"
	"golang.org/x/sys/unix"
)

// quarantined counts the files in a root's quarantine.
func quarantined(t *testing.T, dir string) int {
	t.Helper()
	list, err := os.ReadDir(filepath.Join(dir, pieceformat.QuarantineDir))
	must(t, err)
	return len(list)
}

// TestScanErrorsAreNoDamage: what cannot be read at a start is left where it is, and counted; the next start finds it.
func TestScanErrorsAreNoDamage(t *testing.T) {
	for _, rule := range []string{
		"read **.kv: eio", "read **.kv 2nd: eio", "open **.kv 1st: eio", "stat **.kv 1st: eio",
		"read **/.kvhost/namespaces/* 1st: eio\nread **/.kvhost-copy/namespaces/* 1st: eio", // read again, so nothing is left alone
	} {
		t.Run(rule, func(t *testing.T) {
			f, faulty := faultyFixture(t, 200)
			f.mustPut(0, 1, 2, 3, 4, 5)
			must(t, f.store.Close())
			dir := f.cfg.Roots[0].Path
			must(t, os.Remove(filepath.Join(dir, pieceformat.CheckpointFile)))
			faulty.Set(faultfs.MustRules(rule)...)
			f.start()
			if faulty.Injected() == 0 {
				t.Fatal("the rule struck nothing")
			}
			if n := quarantined(t, dir); n != 0 {
				t.Errorf("%d sound files are in quarantine", n)
			}
			if st := f.store.Stats().Roots[0]; (st.Orphaned == 0) != strings.Contains(rule, "namespaces") || st.Used != 6*pieceBytes {
				t.Errorf("what was left alone is not in the account: %+v", st)
			}
			faulty.Set()
			f.restart()
			f.mustRead(upTo(6)...)
			f.checkUsed()
		})
	}
}

// TestQuarantineIsCountedAtAStart: a file in quarantine that gives no answer at a start is in the account, or its root is
// not used yet.
func TestQuarantineIsCountedAtAStart(t *testing.T) {
	f, faulty := faultyFixture(t, 100)
	f.mustPut(0, 1)
	l := f.lookup(0)
	p, err := l.Open(0, 0)
	f.must(err)
	p.Bad(errors.New("on purpose"))
	p.Close()
	l.Release()
	f.accounts("one is in quarantine", 2)
	f.must(f.store.Close())
	faulty.Set(faultfs.MustRules("stat **/quarantine/* 1st: eio")...)
	s, err := Open(t.Context(), f.cfg)
	if err == nil {
		f.store = s
		f.accounts("opened all the same", 2)
		f.must(s.Close())
	}
	if faulty.Injected() == 0 {
		t.Fatal("the rule struck nothing")
	}
	faulty.Set()
	f.start()
	f.accounts("opened again", 2)
	f.checkUsed()
}

// TestScanHangsIsNoDamage: a root that gives no answer in the middle of its scan is scanned again when it is back.
func TestScanHangsIsNoDamage(t *testing.T) { synctest.Test(t, testScanHangsIsNoDamage) }

func testScanHangsIsNoDamage(t *testing.T) {
	f, faulty := faultyFixture(t, 20, func(c *Config) {
		c.IOTimeout, c.UpkeepEvery, c.ScanWait = shortIO, shortIO/100, -1 // of a bubble's clock, which stands still while a disk works
	})
	t.Cleanup(faulty.Release)
	f.mustPut(0, 1, 2)
	must(t, f.store.Close())
	must(t, os.Remove(filepath.Join(f.cfg.Roots[0].Path, pieceformat.CheckpointFile)))
	faulty.Set(faultfs.MustRules("read **.kv 2nd: hang")...)
	f.open()
	f.awaitState(0, health.Out)
	faulty.Release()
	<-f.store.ScanDone()
	f.mustRead(upTo(3)...)
	f.checkUsed()
}

// TestNamespaceIsDamaged: a namespace survives damage to one of the two copies of its text, whichever it is. When both
// are there and wrong, its pieces wait for a session that opens it, or for fsck. When both are gone they are nobody's.
func TestNamespaceIsDamaged(t *testing.T) {
	copies := pieceformat.Copies(pieceformat.NamespacesDir)
	for _, c := range []struct {
		name  string
		dirs  []string
		spoil func(name string) error
		lost  bool
	}{
		{"a bit of the first", copies[:1], flipBit, false},
		{"a bit of the second", copies[1:], flipBit, false},
		{"a bit of both", copies, flipBit, false},
		{"first gone", copies[:1], os.Remove, false},
		{"second gone", copies[1:], os.Remove, false},
		{"both gone", copies, os.Remove, true},
		{"no bytes", copies[:1], func(name string) error { return os.Truncate(name, 0) }, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFixture(t, t.TempDir(), 200, 1)
			f.mustPut(0, 1, 2)
			must(t, f.store.Close())
			dir := f.cfg.Roots[0].Path
			err := os.Remove(filepath.Join(dir, pieceformat.CheckpointFile))
			for _, d := range c.dirs {
				err = errors.Join(err, c.spoil(filepath.Join(dir, d, f.ns.Digest().String())))
			}
			must(t, err)
			f.start()
			if got, want := quarantined(t, dir), map[bool]int{true: 3}[c.lost]; got != want {
				t.Errorf("%d files in quarantine, want %d", got, want)
			}
			for n := range uint64(3) {
				if f.has(n) != (len(c.dirs) == 1) {
					t.Errorf("key %d: hit %t", n, !c.lost)
				}
			}
			f.restart()
			for n := range uint64(3) {
				if f.has(n) == c.lost {
					t.Errorf("key %d after another start: hit %t", n, !c.lost)
				}
			}
			for _, d := range copies {
				b, err := os.ReadFile(filepath.Join(dir, d, f.ns.Digest().String()))
				if err != nil || kv.TextDigest(b) != f.ns.Digest() {
					t.Errorf("the copy in %s is not sound: %v", d, err)
				}
			}
		})
	}
}

func flipBit(name string) error {
	b, err := os.ReadFile(name)
	if err == nil {
		b[len(b)/2] ^= 4
		err = os.WriteFile(name, b, 0o600)
	}
	return err
}

// TestPublishWhereSomethingCannotBeRead leaves alone what stands under a put's name: nobody knows what it is.
func TestPublishWhereSomethingCannotBeRead(t *testing.T) {
	f, faulty := faultyFixture(t, 4)
	f.mustPut(0)
	name := f.pieceFile(0, 0)
	want, err := os.ReadFile(name)
	must(t, err)
	f.drop(0)
	put(t, name, want)
	faulty.Set(faultfs.MustRules("read **.kv: eio")...)
	if err := f.put(0, 0); !errors.Is(err, unix.EIO) {
		t.Errorf("got %v", err)
	}
	if got, err := os.ReadFile(name); err != nil || !bytes.Equal(got, want) {
		t.Errorf("the file is not what it was: %v", err)
	}
	faulty.Set()
	f.mustPut(0)
	f.mustRead(0)
}

// TestScanMeetsAnOrphan: a scan opens a file just before its entry is dropped, and the file would not be unlinked. It is
// in the account once.
func TestScanMeetsAnOrphan(t *testing.T) {
	f, faulty := faultyFixture(t, 8, func(c *Config) { c.IOTimeout, c.UpkeepEvery, c.ScanWait = -1, time.Hour, -1 })
	f.mustPut(0)
	f.must(f.store.Close())
	f.must(os.Remove(filepath.Join(f.cfg.Roots[0].Path, pieceformat.CheckpointFile)))
	faulty.Set(faultfs.MustRules("open **.kv 1st: hang\nremove **.kv: eacces")...)
	release := sync.OnceFunc(faulty.Release)
	defer release()
	f.open()
	f.must(faulty.AwaitHanging(t.Context(), 1))
	if err := f.put(0, 0); !errors.Is(err, ErrResident) { // its file is found by its name
		t.Fatal(err)
	}
	r := f.root()
	r.drop(f.markOf(0), 0)
	release()
	<-f.store.ScanDone()
	f.checkUsed()
	if f.has(0) {
		t.Error("what is about to be unlinked is served")
	}
	faulty.Set()
	f.maintain(RetryRemovals)
	f.checkUsed()
	equal(t, "Used", r.Account.Figures().Used, 0)
}
