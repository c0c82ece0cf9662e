package staging_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/kvhost/kvhost/staging"
	"golang.org/x/sys/unix"
)

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
	var refused error
	inner := &staging.Around{Inner: staging.OS(), Run: func(c staging.Call) error {
		if c.Op == staging.OpRemove && refused != nil {
			return refused
		}
		return c.Do()
	}}
	fsys := staging.OnRemove(inner, func(dev, ino uint64) { told = append(told, id{dev, ino}) })
	dir := t.TempDir()
	name := filepath.Join(dir, "f")
	f, err := staging.OpenDirect(fsys, name, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	must(t, err)
	defer f.Close()
	info, err := f.Stat()
	must(t, err)
	refused = unix.EIO
	if err := fsys.Remove(name); err == nil || len(told) > 0 {
		t.Errorf("%v, told of %v", err, told)
	}
	refused = nil
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
