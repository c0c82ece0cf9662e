package health

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/staging"
)

func TestMakeRoot(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	testenv.OK(t, os.WriteFile(file, nil, 0o600))
	for _, c := range []struct {
		dir string
		is  error
	}{
		{filepath.Join(dir, "kv"), nil},
		{filepath.Join(dir, "kv"), nil}, // it is there
		{filepath.Join(dir, "a", "kv"), ErrNoParent},
		{file, unix.ENOTDIR},
		{filepath.Join(file, "kv"), unix.ENOTDIR},
	} {
		if err := MakeRoot(staging.Below(c.dir), c.dir, false); !errors.Is(err, c.is) {
			t.Errorf("making the root %s: error %v, want %v", c.dir, err, c.is)
		}
	}
	if info, err := os.Stat(filepath.Join(dir, "kv")); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("the root that was made: %v, error %v, want mode 0700", info, err)
	}
}

// With require_mount a root must not be on the file system of /, whether it is there or is to be made.
func TestMakeRootNeedsMount(t *testing.T) {
	for _, dir := range []string{"/", "/kvhost-is-not-here"} {
		if err := MakeRoot(staging.Below(dir), dir, true); !errors.Is(err, ErrNotMounted) {
			t.Errorf("making the root %s with require_mount: error %v, want %v", dir, err, ErrNotMounted)
		}
	}
	if _, err := os.Stat("/kvhost-is-not-here"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("it was made: %v", err)
	}
	if err := MakeRoot(staging.Below("/proc"), "/proc", true); err != nil {
		t.Errorf("/proc is a file system of its own: %v", err)
	}
	if err := MakeRoot(staging.Below("/a/b/c"), "/a/b/c", true); !errors.Is(err, ErrNoParent) ||
		!strings.Contains(err.Error(), "/a/b") {
		t.Errorf("nothing to be on: %v", err)
	}
}
