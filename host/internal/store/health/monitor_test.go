package health

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/staging"
	"golang.org/x/sys/unix"
)

type away struct{ probes int }

func (a *away) Probe() (bool, error) { a.probes++; return false, errors.New("away") }

func (a *away) Reopen(context.Context, State, bool) error { return nil }

// TestProbesGoOn: a root that was out for a day is probed every few seconds, so that it is back soon after its device.
func TestProbesGoOn(t *testing.T) {
	now, root := time.Now(), &away{}
	m := NewMonitor(Config{
		FS: staging.OS(), Dir: t.TempDir(), Limit: time.Minute, Every: time.Second, Log: slog.New(slog.DiscardHandler),
		Now: func() time.Time { return now },
	})
	defer m.Close()
	m.TakeOut("test", errors.New("gone"), "")
	check := func(d time.Duration) (probes int) {
		before := root.probes
		for end := now.Add(d); now.Before(end); now = now.Add(100 * time.Millisecond) {
			m.Check(t.Context(), root)
		}
		return root.probes - before
	}
	if got := check(5 * time.Second); got < 2 || got > 3 {
		t.Errorf("%d probes in the first 5 s, want 2 or 3: the pause doubles", got)
	}
	now = now.Add(24 * time.Hour)
	check(time.Hour)
	if got := check(5 * time.Second); got < 1 || got > 2 {
		t.Errorf("%d probes in 5 s after an hour of them, want 1 or 2", got)
	}
}

// makeRoot makes a root that is missing, after a dry run, which leaves nothing.
func makeRoot(dir string, mount bool) error {
	fsys := staging.Below(dir)
	missing, err := MissingRoot(fsys, dir, mount)
	if err != nil || !missing {
		return err
	}
	if err := MakeRoot(fsys, dir, true); err != nil {
		return err
	}
	if missing, err = MissingRoot(fsys, dir, mount); err != nil || !missing {
		return errors.Join(err, fs.ErrExist)
	}
	return MakeRoot(fsys, dir, false)
}

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
		if err := makeRoot(c.dir, false); !errors.Is(err, c.is) {
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
		if err := makeRoot(dir, true); !errors.Is(err, ErrNotMounted) {
			t.Errorf("making the root %s with require_mount: error %v, want %v", dir, err, ErrNotMounted)
		}
	}
	if _, err := os.Stat("/kvhost-is-not-here"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("it was made: %v", err)
	}
	if err := makeRoot("/proc", true); err != nil {
		t.Errorf("/proc is a file system of its own: %v", err)
	}
	if err := makeRoot("/a/b/c", true); !errors.Is(err, ErrNoParent) ||
		!strings.Contains(err.Error(), "/a/b") {
		t.Errorf("nothing to be on: %v", err)
	}
}
