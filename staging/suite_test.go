package staging_test

import (
	"os"
	"testing"

	"github.com/kvhost/kvhost/staging"
	"github.com/kvhost/kvhost/staging/faultfs"
)

// memoryDir is a directory on the memory file system, removed at the end.
func memoryDir(t testing.TB) string {
	dir, err := os.MkdirTemp("/dev/shm", "kvhost-staging-")
	must(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func TestOSOnDisk(t *testing.T)   { faultfs.RunSuite(t, staging.OS(), t.TempDir()) }
func TestOSInMemory(t *testing.T) { faultfs.RunSuite(t, staging.OS(), memoryDir(t)) }
func TestFaultyWithoutRules(t *testing.T) {
	faultfs.RunSuite(t, faultfs.New(staging.OS()), t.TempDir())
}
func TestFaultyWithRulesElsewhere(t *testing.T) {
	f := faultfs.New(staging.OS(), faultfs.MustRules("any /nowhere/**: eio")...)
	faultfs.RunSuite(t, f, t.TempDir())
	if n := f.Injected(); n != 0 {
		t.Fatalf("%d injected", n)
	}
}
func TestFaultyRefusesDirect(t *testing.T) {
	f := faultfs.New(staging.OS(), faultfs.MustRules("direct **: einval")...)
	faultfs.RunSuite(t, f, t.TempDir())
	if n := f.Injected(); n != 1 {
		t.Fatalf("asked for direct I/O %d times, want once: the answer is remembered", n)
	}
}

func TestBufferedNeverGoesDirect(t *testing.T) {
	f := faultfs.New(staging.OS())
	fsys := staging.Buffered(f)
	faultfs.RunSuite(t, fsys, t.TempDir())
	file, err := staging.OpenDirect(fsys, t.TempDir()+"/plain", os.O_CREATE|os.O_RDWR, 0o600)
	must(t, err)
	defer file.Close()
	if file.Direct() {
		t.Error("opened past the page cache")
	}
}

// must ends a test that cannot go on without what failed.
func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
