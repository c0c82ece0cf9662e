package faultfs_test

import (
	"errors"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
	"github.com/kvhost/kvhost/staging"
)

// TestWatchedGivesUp lets each kind of operation hang. The caller gets its error, what comes late is undone, and the
// helper is used again.
func TestWatchedGivesUp(t *testing.T) {
	dir := t.TempDir()
	faulty := faultfs.New(staging.OS())
	var ended atomic.Int64
	seen := make(chan error, 100)
	w := staging.Watched(faulty, staging.Watch{
		Limit: time.Minute, Seen: func(_ staging.Op, _ string, err error) { seen <- err },
		Ended: func(staging.Op, string) { ended.Add(1) },
	})
	defer w.Close()
	name := filepath.Join(dir, "f")
	file, err := w.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o600)
	testenv.OK(t, err)
	page := make([]byte, 8)
	n := int64(0)
	for _, c := range []struct {
		rule string
		call func() error
	}{
		{"open", func() error { _, err := w.OpenFile(name, os.O_RDONLY, 0); return err }},
		{"open", func() error { _, err := staging.OpenDirect(w, name, os.O_RDONLY, 0); return err }},
		{"read", func() error { _, err := file.ReadAt(page, 0); return err }},
		{"write", func() error { _, err := file.WriteAt(page, 0); return err }},
		{"sync", file.Datasync},
		{"stat", func() error { _, err := file.Stat(); return err }},
		{"stat", func() error { _, err := w.Stat(name); return err }},
		{"rename", func() error { return w.Rename(name, name+"2") }},
		{"publish", func() error { return w.RenameNoReplace(name+"2", name) }},
		{"remove", func() error { return w.Remove(name + "none") }},
		{"readdir", func() error { _, err := w.ReadDir(dir); return err }},
		{"statfs", func() error { _, err := w.Statfs(dir); return err }},
		{"syncfs", func() error { return w.SyncFS(dir) }},
		{"syncdir", func() error { return w.SyncDir(dir) }},
		{"mkdir", func() error { return w.MkdirAll(dir, 0o700) }},
		{"link", func() error { return w.Link(name, name+"3") }},
		{"allocate", func() error { return file.Allocate(4096) }},
		{"lock", func() error { _, err := w.Lock(name + "l"); return err }},
		{"close", file.Close},
	} {
		faulty.Set(faultfs.MustRules(c.rule + " **: hang")...)
		w.SetLimit(20 * time.Millisecond)
		err := c.call()
		w.SetLimit(time.Minute)
		var hung *staging.HungError
		if !errors.As(err, &hung) || !errors.Is(err, staging.ErrHung) {
			t.Fatalf("under the rule %q: error %v, want %v", c.rule, err, staging.ErrHung)
		}
		if w.Stuck() != 1 || !errors.Is(<-seen, staging.ErrHung) {
			t.Errorf("%s: %d stuck", c.rule, w.Stuck())
		}
		select {
		case <-hung.Ended():
			t.Errorf("%s has ended", c.rule)
		default:
		}
		if err := faulty.AwaitHanging(testenv.Context(t), 1); err != nil { // it may be given up before it came so far
			t.Fatal(err)
		}
		faulty.Release()
		<-hung.Ended()
		n++
		testenv.Until(t, "the end of an operation that was given up", func() bool { return ended.Load() >= n })
		if w.Stuck() != 0 {
			t.Errorf("%s: %d stuck after the end", c.rule, w.Stuck())
		}
	}
	faulty.Set()
	if lock, err := w.Lock(name + "l"); err != nil {
		t.Errorf("a lock that came late was kept: %v", err)
	} else if err := lock.Close(); err != nil {
		t.Error(err)
	}
	links, err := os.ReadDir("/proc/self/fd")
	testenv.OK(t, err)
	for _, l := range links {
		if to, _ := os.Readlink("/proc/self/fd/" + l.Name()); filepath.Dir(to) == dir {
			t.Errorf("%s is still open", to)
		}
	}
}
