package staging_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
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

func TestOnRemoveTellsWhatWasRemoved(t *testing.T) {
	type id struct{ dev, ino uint64 }
	var told []id
	inner := faultfs.New(staging.OS())
	fsys := staging.OnRemove(inner, func(dev, ino uint64) { told = append(told, id{dev, ino}) })
	dir := t.TempDir()
	name := filepath.Join(dir, "f")
	f, err := staging.OpenDirect(fsys, name, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	must(t, err)
	defer f.Close()
	info, err := f.Stat()
	must(t, err)
	inner.Set(faultfs.MustRules("remove **: eio")...)
	if err := fsys.Remove(name); err == nil || len(told) > 0 {
		t.Errorf("%v, told of %v", err, told)
	}
	inner.Set()
	if err := fsys.Remove(name); err != nil || len(told) != 1 || told[0] != (id{info.Dev, info.Ino}) {
		t.Errorf("%v, told of %v", err, told)
	}
	if err := fsys.Remove(name); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
	if err := errors.Join(fsys.Mkdir(filepath.Join(dir, "d"), 0o700), fsys.Remove(filepath.Join(dir, "d"))); err != nil || len(told) != 1 {
		t.Errorf("%v, told of %v", err, told)
	}
}
