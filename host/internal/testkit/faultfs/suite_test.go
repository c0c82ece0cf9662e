package faultfs_test

import (
	"os"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
	"github.com/kvhost/kvhost/staging"
	"golang.org/x/sys/unix"
)

// TestSuite runs the suite of file systems on those of staging and on the doubles.
func TestSuite(t *testing.T) {
	elsewhere := faultfs.New(staging.OS(), faultfs.MustRules("any /nowhere/**: eio")...)
	noDirect := faultfs.New(staging.OS(), faultfs.MustRules("direct **: einval")...)
	shm, err := os.MkdirTemp("/dev/shm", "kvhost-suite-")
	if testenv.SharedMemory.Have() {
		testenv.OK(t, err)
	}
	t.Cleanup(func() { os.RemoveAll(shm) })
	below := t.TempDir()
	for _, c := range []struct {
		name string
		fs   staging.FS
		dir  string
	}{
		{"on disk", staging.OS(), t.TempDir()},
		{"in memory", staging.OS(), shm + "/os"},
		{"below, on disk", staging.Below(below), below},
		{"below, in memory", staging.Below(t.TempDir(), shm+"/below"), shm + "/below"},
		{"buffered", staging.Buffered(staging.OS()), t.TempDir()},
		{"without rules", faultfs.New(staging.OS()), t.TempDir()},
		{"with rules elsewhere", elsewhere, t.TempDir()},
		{"refuses direct I/O", noDirect, t.TempDir()},
	} {
		t.Run(c.name, func(t *testing.T) {
			if strings.HasSuffix(c.name, "in memory") {
				testenv.Need(t, testenv.SharedMemory)
			}
			testenv.OK(t, os.MkdirAll(c.dir, 0o700))
			faultfs.RunSuite(t, c.fs, c.dir)
		})
	}
	if n := elsewhere.Injected(); n != 0 {
		t.Errorf("%d faults were injected under a rule about no file of the suite, want none", n)
	}
	var on unix.Statfs_t
	testenv.OK(t, unix.Statfs(below, &on))
	want := uint64(1)
	if on.Type == unix.TMPFS_MAGIC { // whose files are memory in any case
		want = 0
	}
	if n := noDirect.Injected(); n != want {
		t.Errorf("direct I/O was asked for %d times, want %d: the answer is remembered", n, want)
	}
}

func TestBufferedNeverGoesDirect(t *testing.T) {
	file, err := staging.OpenDirect(staging.Buffered(faultfs.New(staging.OS())), t.TempDir()+"/plain", os.O_CREATE|os.O_RDWR, 0o600)
	testenv.OK(t, err)
	defer file.Close()
	if file.Direct() {
		t.Error("opened past the page cache")
	}
}
