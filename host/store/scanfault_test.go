package store

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/kvhost/kvhost/host/store/health"
	"github.com/kvhost/kvhost/host/store/pieceformat"
	"github.com/kvhost/kvhost/staging/faultfs"
	"golang.org/x/sys/unix"
)

// quarantined counts the files in a root's quarantine.
func quarantined(t *testing.T, dir string) int {
	t.Helper()
	list, err := os.ReadDir(filepath.Join(dir, pieceformat.QuarantineDir))
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}

// TestScanErrorsAreNoDamage: what cannot be read at a start is left where it is, and counted; the next start finds it.
func TestScanErrorsAreNoDamage(t *testing.T) {
	for _, rule := range []string{
		"read **.kv: eio", "read **.kv 2nd: eio", "open **.kv 1st: eio", "stat **.kv 1st: eio", "read **/namespaces/*: eio",
	} {
		t.Run(rule, func(t *testing.T) {
			f, faulty := faultyFixture(t, 200)
			f.mustPut(0, 1, 2, 3, 4, 5)
			if err := f.store.Close(); err != nil {
				t.Fatal(err)
			}
			dir := f.cfg.Roots[0].Path
			if err := os.Remove(filepath.Join(dir, pieceformat.CheckpointFile)); err != nil {
				t.Fatal(err)
			}
			faulty.Set(faultfs.MustRules(rule)...)
			f.start()
			if faulty.Injected() == 0 {
				t.Fatal("the rule struck nothing")
			}
			if n := quarantined(t, dir); n != 0 {
				t.Errorf("%d sound files are in quarantine", n)
			}
			if st := f.store.Stats().Roots[0]; st.Orphaned == 0 || st.Used != 6*pieceBytes {
				t.Errorf("what was left alone is not in the account: %+v", st)
			}
			faulty.Set()
			f.restart()
			for n := range uint64(6) {
				f.mustRead(n)
			}
			f.checkUsed()
		})
	}
}

// TestScanHangsIsNoDamage: a root that gives no answer in the middle of its scan is scanned again when it is back.
func TestScanHangsIsNoDamage(t *testing.T) {
	f, faulty := faultyFixture(t, 20, func(c *Config) {
		c.IOTimeout, c.UpkeepEvery, c.ScanWait = shortIO, shortIO/100, -1
	})
	t.Cleanup(faulty.Release)
	f.mustPut(0, 1, 2)
	if err := f.store.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(f.cfg.Roots[0].Path, pieceformat.CheckpointFile)); err != nil {
		t.Fatal(err)
	}
	faulty.Set(faultfs.MustRules("read **.kv 2nd: hang")...)
	f.open()
	f.awaitState(0, health.Out)
	faulty.Release()
	<-f.store.ScanDone()
	for n := range uint64(3) {
		f.mustRead(n)
	}
	f.checkUsed()
}

// TestNamespaceIsDamaged: pieces of a namespace whose text is there and wrong wait for a session that opens it, or for
// fsck. Those of one whose text is gone are nobody's.
func TestNamespaceIsDamaged(t *testing.T) {
	for _, gone := range []bool{false, true} {
		t.Run(fmt.Sprint(gone), func(t *testing.T) {
			f := newFixture(t, t.TempDir(), 200, 1)
			f.mustPut(0, 1, 2)
			if err := f.store.Close(); err != nil {
				t.Fatal(err)
			}
			dir := f.cfg.Roots[0].Path
			text := filepath.Join(dir, pieceformat.NamespacesDir, f.ns.Digest().String())
			err := os.Remove(filepath.Join(dir, pieceformat.CheckpointFile))
			if gone {
				err = errors.Join(err, os.Remove(text))
			} else {
				put(t, text, []byte("model=another\n"))
			}
			if err != nil {
				t.Fatal(err)
			}
			f.start()
			if got, want := quarantined(t, dir), map[bool]int{true: 3}[gone]; got != want {
				t.Errorf("%d files in quarantine, want %d", got, want)
			}
			f.restart()
			for n := range uint64(3) {
				if f.has(n) == gone {
					t.Errorf("key %d: hit %t", n, !gone)
				}
			}
		})
	}
}

// TestPublishWhereSomethingCannotBeRead leaves alone what stands under a put's name: nobody knows what it is.
func TestPublishWhereSomethingCannotBeRead(t *testing.T) {
	f, faulty := faultyFixture(t, 4)
	f.mustPut(0)
	name := f.pieceFile(0, 0)
	want, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	f.store.roots[0].drop(f.markOf(0), 0)
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
