package store

import (
	"context"
	"testing"

	"github.com/kvhost/kvhost/staging"
	"github.com/kvhost/kvhost/staging/faultfs"
)

// The account of a root covers what lies on its disk at each moment, also in the middle of an operation.

// whileHanging runs an operation that hangs in the file system by these rules, and looks at the account meanwhile.
func (f *fixture) whileHanging(fsys *faultfs.FS, rules string, operation, meanwhile func()) {
	f.Helper()
	fsys.Set(faultfs.MustRules(rules)...)
	ctx, ended := context.WithCancel(f.Context())
	go func() {
		defer ended()
		operation()
	}()
	f.must(fsys.AwaitHanging(ctx, 1))
	meanwhile()
	f.covers("meanwhile")
	fsys.Set()
	<-ctx.Done()
	f.covers("afterwards")
}

// covers checks that the account has at least what is on the disk.
func (f *fixture) covers(when string) {
	f.Helper()
	used, disk := int64(0), int64(0)
	f.must(f.store.Inspect(func(list []Inspection) {
		used, disk = list[0].Used, onDisk(f, f.cfg.Roots[0].Path)
	}))
	if used < disk {
		f.Errorf("%s the account has %d bytes, %d are on disk", when, used, disk)
	}
}

// TestATakenFileIsCounted: a put has taken over a victim's file, and needs more room.
func TestATakenFileIsCounted(t *testing.T) {
	fsys := faultfs.New(staging.OS())
	f := newFixture(t, t.TempDir(), 4, 2, func(c *Config) { c.FS = fsys })
	f.mustPut(0, 1, 2, 3)
	var err error
	f.whileHanging(fsys, "remove **_r1.kv 1st: eio\nremove **.kv 2nd: hang", func() {
		var p *Put
		if p, err = f.store.Put(t.Context(), f.request(9, 0, 0)); err == nil {
			p.Abort(context.Canceled)
		}
	}, func() {
		if n := len(f.temporaries()); n != 1 {
			t.Errorf("%d temporaries, want the file that was taken over", n)
		}
	})
	f.must(err)
	f.must(f.store.Maintain(t.Context(), 0, RetryRemovals))
	equal(t, "bytes in the account", f.store.Stats().Roots[0].Used, onDisk(t, f.cfg.Roots[0].Path))
}

// TestALeftFileIsPublishedAgain: a put finds its piece under the name, in a file that could not be unlinked. Its own
// temporary is there until it is removed.
func TestALeftFileIsPublishedAgain(t *testing.T) {
	fsys := faultfs.New(staging.OS())
	f := newFixture(t, t.TempDir(), 4, 1, func(c *Config) { c.FS = fsys })
	f.mustPut(0)
	fsys.Set(faultfs.MustRules("remove **.kv: eio")...)
	f.drop(0)
	p := f.begin(0)
	f.must(write(p))
	var err error
	f.whileHanging(fsys, "remove **.tmp: hang", func() { err = p.Publish(t.Context()) }, func() {})
	f.must(err)
	f.mustRead(0)
	equal(t, "bytes in the account", f.store.Stats().Roots[0].Used, pieceBytes)
}

// TestALeftFileGoesBeforeItsEntry: a file that could not be unlinked is removed by a retry while the entry's other files
// are being unlinked.
func TestALeftFileGoesBeforeItsEntry(t *testing.T) {
	fsys := faultfs.New(staging.OS())
	f := newFixture(t, t.TempDir(), 4, 2, func(c *Config) { c.FS = fsys })
	f.mustPut(0)
	m := f.markOf(0)
	f.whileHanging(fsys, "remove **_r0.kv 1st: eio\nremove **_r1.kv: hang", func() { f.root().drop(m, 0) },
		func() { f.must(f.store.Maintain(t.Context(), 0, RetryRemovals)) })
	equal(t, "bytes in the account", f.store.Stats().Roots[0].Used, 0)
	equal(t, "bytes on the disk", onDisk(t, f.cfg.Roots[0].Path), 0)
}
