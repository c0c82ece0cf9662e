package store

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"github.com/kvhost/kvhost/staging"
	"github.com/kvhost/kvhost/staging/faultfs"
)

// unlinkVictims keeps puts from reusing the files of victims, as on a shared root.
func (f *fixture) unlinkVictims() { f.own().unlinksAll = true }

func (f *fixture) recycled() uint64 { return f.store.Stats().Roots[0].Recycled }

func (f *fixture) temporaries() (found []string) {
	f.Helper()
	err := filepath.WalkDir(f.cfg.Roots[0].Path, func(path string, d os.DirEntry, err error) error {
		if err == nil && filepath.Ext(path) == ".tmp" {
			found = append(found, path)
		}
		return err
	})
	must(f, err)
	return found
}

func (f *fixture) mustHold(n uint64) {
	f.Helper()
	l := f.lookup(n)
	defer l.Release()
	got, err := read(l, 0, 0)
	if err != nil {
		f.Fatalf("key %d: %v", n, err)
	}
	if want := payload(f.space.Plan(0), testKey(n), 0); !bytes.Equal(got, want[:len(got)]) {
		f.Errorf("key %d holds other bytes", n)
	}
}

// strangers is a file system on which another user has the files that are opened to be written again.
type strangers struct {
	staging.FS
	there atomic.Bool
}

func (s *strangers) OpenFile(name string, flag int, perm fs.FileMode) (staging.File, error) {
	f, err := s.FS.OpenFile(name, flag, perm)
	if err == nil && flag&os.O_RDWR != 0 && flag&os.O_CREATE == 0 && s.there.Load() {
		return strange{f}, nil
	}
	return f, err
}

type strange struct{ staging.File }

func (f strange) Stat() (staging.Info, error) {
	info, err := f.File.Stat()
	info.Owner++
	return info, err
}

// A store that evicts overwrites the victim's file: no file is made or unlinked, and every key has its own bytes.
func TestVictimsFilesAreTakenOver(t *testing.T) {
	fsys := faultfs.New(staging.OS())
	f := newFixture(t, t.TempDir(), 3, 1, func(c *Config) { c.FS = fsys })
	f.mustPut(0, 1, 2)
	fsys.Set(faultfs.MustRules("remove **.kv: eio")...) // none may be unlinked
	f.mustPut(3, 4, 5, 6)
	if n := f.recycled(); n != 4 {
		t.Errorf("%d files were taken over, want 4", n)
	}
	for n := range uint64(4) {
		if f.has(n) {
			t.Errorf("key %d is still there", n)
		}
	}
	for _, n := range []uint64{4, 5, 6} {
		f.mustHold(n)
	}
	if left := f.temporaries(); len(left) > 0 {
		t.Errorf("temporaries: %v", left)
	}
	fsys.Set()
	f.restart()
	for _, n := range []uint64{4, 5, 6} {
		f.mustHold(n)
	}
}

func TestWhatIsNotTakenOver(t *testing.T) {
	t.Run("a file with a second name", func(t *testing.T) {
		f := newFixture(t, t.TempDir(), 1, 1)
		f.mustPut(0)
		l := f.lookup(0)
		p, err := l.Open(0, 0)
		must(t, err)
		other := filepath.Join(t.TempDir(), "backup")
		must(t, os.Link(p.File().Name(), other))
		before, err := os.ReadFile(other)
		must(t, err)
		p.Close()
		l.Release()
		f.mustPut(1)
		f.mustHold(1)
		if after, err := os.ReadFile(other); err != nil || !bytes.Equal(before, after) {
			t.Errorf("the other name's bytes changed: %v", err)
		}
		if n := f.recycled(); n != 0 {
			t.Errorf("%d taken over", n)
		}
	})
	t.Run("another user's file", func(t *testing.T) {
		fsys := &strangers{FS: staging.OS()}
		f := newFixture(t, t.TempDir(), 1, 1, func(c *Config) { c.FS = fsys })
		f.mustPut(0)
		f.mustPut(1)
		equal(t, "taken over", f.recycled(), 1)
		fsys.there.Store(true)
		f.mustPut(2)
		f.mustHold(2)
		equal(t, "taken over when the files have another owner", f.recycled(), 1)
		f.checkUsed()
	})
	t.Run("a file of another size", func(t *testing.T) {
		f := newFixture(t, t.TempDir(), 2, 1)
		q := f.request(0, 0, 0)
		q.Group = 1 // larger files
		p, err := f.store.Put(context.Background(), q)
		must(t, err)
		must(t, errors.Join(write(p), p.Publish(context.Background())))
		f.mustPut(1, 2)
		f.mustHold(1)
		f.mustHold(2)
		if n := f.recycled(); n != 0 {
			t.Errorf("%d taken over", n)
		}
	})
	t.Run("anything of a shared root", func(t *testing.T) {
		f := newFixture(t, t.TempDir(), 1, 1)
		f.unlinkVictims()
		f.mustPut(0, 1)
		f.mustHold(1)
		if n := f.recycled(); n != 0 {
			t.Errorf("%d taken over", n)
		}
	})
}

// Whatever goes wrong on the way, the put uses a new file or ends with nothing left behind.
func TestTakingOverFails(t *testing.T) {
	for name, rule := range map[string]string{
		"rename fails":                 "rename **: eio",
		"rename happened but says not": "rename **: eio after",
		"the file cannot be opened":    "open **.tmp 1st: eio",
		"the file cannot be looked at": "stat **.tmp 1st: eio",
		"the write fails":              "write **.tmp: eio",
	} {
		t.Run(name, func(t *testing.T) {
			fsys := faultfs.New(staging.OS())
			f := newFixture(t, t.TempDir(), 2, 1, func(c *Config) { c.FS = fsys })
			f.mustPut(0, 1)
			fsys.Set(faultfs.MustRules(rule)...)
			err := f.put(2, 0)
			fsys.Set()
			if err == nil {
				f.mustHold(2)
			}
			f.mustHold(1)
			if left := f.temporaries(); len(left) > 0 {
				t.Errorf("temporaries: %v", left)
			}
			f.mustPut(3, 4)
			f.mustHold(3)
			f.mustHold(4)
		})
	}
	t.Run("rename happened but says not, and the file cannot be unlinked", func(t *testing.T) {
		fsys := faultfs.New(staging.OS())
		f := newFixture(t, t.TempDir(), 2, 1, func(c *Config) { c.FS = fsys })
		f.mustPut(0, 1)
		fsys.Set(faultfs.MustRules("rename **: eio after\nremove **.tmp: eacces")...)
		err := f.put(2, 0)
		fsys.Set()
		if disk, _ := usage(t, f.cfg.Roots[0].Path); f.store.Stats().Roots[0].Used < disk {
			t.Errorf("%d bytes on disk, the account says %d: put: %v", disk, f.store.Stats().Roots[0].Used, err)
		}
		f.maintain(RetryRemovals)
		if left := f.temporaries(); len(left) > 0 {
			t.Errorf("temporaries: %v", left)
		}
		f.checkUsed()
	})
	t.Run("the put is aborted before it opened the file", func(t *testing.T) {
		f := newFixture(t, t.TempDir(), 1, 1)
		f.mustPut(0)
		p, err := f.store.Put(context.Background(), f.request(1, 1, 0))
		must(t, err)
		p.Abort(errors.New("no longer wanted"))
		if left := f.temporaries(); len(left) > 0 {
			t.Errorf("temporaries: %v", left)
		}
		if used := f.store.Stats().Roots[0].Used; used != 0 {
			t.Errorf("%d bytes in use", used)
		}
	})
}
