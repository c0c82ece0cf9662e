package store

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/staging/faultfs"
	"golang.org/x/sys/unix"
)

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
	f, faulty, dir := twoRoots(t, 200)
	bad, _ := f.spread(20)
	faulty.Set(faultfs.MustRules(fmt.Sprintf("open %s/**.tmp: erofs\nwrite,publish,rename,remove,mkdir %s/**: erofs", dir,
		dir))...)
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
	f := newFixture(t, root, 10, 1, func(c *Config) { c.UpkeepEvery = 5 * time.Millisecond })
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
	f := newFixture(t, filepath.Join(dir, "a"), 20, 1, func(c *Config) {
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
