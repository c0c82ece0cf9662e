package store

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
	"github.com/kvhost/kvhost/staging"
)

// TestStoredAgainWhileStray: a key is stored again before its old file could be removed. The put takes what stands
// there, or the name once it is free, and the orphan is gone: what is promised now is not unlinked.
func TestStoredAgainWhileStray(t *testing.T) {
	for name, gone := range map[string]bool{"there": false, "gone": true} {
		t.Run("named and "+name, func(t *testing.T) {
			f, faulty := faultyFixture(t, 4)
			f.mustPut(0, 1)
			faulty.Set(faultfs.MustRules("remove **: eacces")...)
			f.drop(0)
			faulty.Set()
			f.storedAgain(gone)
		})
	}
	t.Run("and the put fails", func(t *testing.T) {
		f, faulty := faultyFixture(t, 4)
		f.mustPut(0, 1)
		faulty.Set(faultfs.MustRules("remove **: eacces\npublish **: eperm")...)
		f.drop(0)
		if err := f.put(0, 0); !errors.Is(err, unix.EPERM) {
			t.Error(err)
		}
		faulty.Set()
		f.maintain(RetryRemovals)
		f.checkUsed()
	})
}

func (f *fixture) storedAgain(gone bool) {
	f.Helper()
	if got := f.store.Stats().Roots[0].Orphaned; got != pieceBytes {
		f.Fatalf("%d bytes of orphans", got)
	}
	if gone {
		must(f, os.Remove(f.pieceFile(0, 0)))
	}
	f.mustPut(0)
	if st := f.store.Stats().Roots[0]; st.Orphaned != 0 || st.Used != 2*pieceBytes {
		f.Errorf("stored again: %d bytes of orphans, %d used, want 0 and two pieces", st.Orphaned, st.Used)
	}
	f.maintain(RetryRemovals)
	f.mustRead(0)
	f.checkUsed()
}

func (f *fixture) must(err error) {
	f.Helper()
	must(f, err)
}

// TestPublishBesideADeletion: the unlinking of one orphan hangs. Other keys are published meanwhile, and scanned files
// judged.
func TestPublishBesideADeletion(t *testing.T) {
	f, faulty := faultyFixture(t, 8, func(c *Config) { c.IOTimeout, c.UpkeepEvery = -1, time.Hour })
	f.mustPut(0, 1)
	r := f.root()
	faulty.Set(faultfs.MustRules("remove **: eacces")...)
	r.drop(f.markOf(0))
	faulty.Set(faultfs.MustRules("remove **: hang")...)
	release := sync.OnceFunc(faulty.Release)
	defer release()
	var deleting sync.WaitGroup
	deleting.Go(func() { f.maintain(RetryRemovals) })
	ctx := testenv.Context(t)
	f.must(faulty.AwaitHanging(ctx, 1))

	other := make(chan error, 1)
	go func() { other <- f.put(2, 0) }()
	select {
	case err := <-other:
		f.must(err)
	case <-ctx.Done():
		t.Fatal("a publication waited for another file's unlinking")
	}
	if !r.Orphans.Has(f.pieceFile(0, 0)) || r.Orphans.Has(f.pieceFile(1, 0)) {
		t.Error("the file that is being unlinked is not an orphan, or another is")
	}
	release()
	deleting.Wait()
	f.mustRead(2)
	f.checkUsed()
}

// TestStraysGo: what would not be unlinked is tried again, and its bytes are free then.
func TestStraysGo(t *testing.T) {
	f, faulty := faultyFixture(t, 4, func(c *Config) { c.QuarantineFiles = -1 })
	f.mustPut(0, 1, 2, 3)
	faulty.Set(faultfs.MustRules("remove **: eacces\nstat **.kv: eacces")...)
	f.drop(0)
	if got := f.store.Stats().Roots[0]; got.Orphaned != pieceBytes {
		t.Errorf("%d bytes of orphans, and nobody could say that the file is gone", got.Orphaned)
	}
	faulty.Set()
	f.maintain(RetryRemovals)
	if got := f.store.Stats().Roots[0]; got.Orphaned != 0 || got.Used != 3*pieceBytes {
		t.Errorf("tried again: %d bytes of orphans, %d used, want 0 and three pieces", got.Orphaned, got.Used)
	}
	f.checkUsed()

	// One that is stored again is no orphan any more.
	faulty.Set(faultfs.MustRules("remove **: eacces")...)
	l := f.lookup(1)
	p, err := l.Open(0, 0)
	must(t, err)
	p.Bad(errors.New("on purpose"))
	p.Close()
	l.Release()
	faulty.Set()
	f.mustPut(1)
	f.maintain(RetryRemovals)
	f.mustRead(1)
	if got := f.store.Stats().Roots[0]; got.Orphaned != 0 {
		t.Errorf("stored again: %d bytes of orphans, want 0", got.Orphaned)
	}
	f.checkUsed()
}

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

// TestATakenFileIsCounted: a put has taken over a victim's file, and needs more room; it gets it, or ends without. Lookups and
// loads do not wait for it.
func TestATakenFileIsCounted(t *testing.T) {
	for more, want := range map[string]error{": hang": nil, ": hang eacces": ErrNoSpace, ": eacces\nremove **.tmp 1st: hang": ErrNoSpace} {
		fsys := faultfs.New(staging.OS())
		f := newFixture(t, 4, 2, func(c *Config) { c.FS = fsys })
		f.mustPut(0, 1, 2, 3)
		var err error
		f.whileHanging(fsys, "remove **_r1.kv 1st: eio\nremove **.kv 2nd"+more, func() {
			var p *Put
			if p, err = f.store.Put(t.Context(), f.request(9, 0, 0)); err == nil {
				p.Abort(context.Canceled)
			}
		}, func() {
			if n := len(f.temporaries()); n != 1 {
				t.Errorf("%d temporaries, want the file that was taken over", n)
			}
			if f.mustRead(3); f.has(1) != strings.Contains(more, ".tmp") { // or it could not be unlinked
				t.Errorf("remove **.kv 2nd%s: hit %t of the entry that is being unlinked", more, f.has(1))
			}
		})
		if !errors.Is(err, want) {
			t.Errorf("the put ends with %v, want %v", err, want)
		}
		f.must(f.store.Maintain(t.Context(), 0, RetryRemovals))
		equal(t, "bytes in the account", f.store.Stats().Roots[0].Used, onDisk(t, f.cfg.Roots[0].Path))
	}
}

// TestALeftFileIsPublishedAgain: a put finds its piece under the name, in a file that could not be unlinked. Its own
// temporary is there until it is removed.
func TestALeftFileIsPublishedAgain(t *testing.T) {
	f, fsys := faultyFixture(t, 4)
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
	f := newFixture(t, 4, 2, func(c *Config) { c.FS = fsys })
	f.mustPut(0)
	m := f.markOf(0)
	f.whileHanging(fsys, "remove **_r0.kv 1st: eio\nremove **_r1.kv: hang", func() { f.root().drop(m) },
		func() { f.must(f.store.Maintain(t.Context(), 0, RetryRemovals)) })
	equal(t, "bytes in the account", f.store.Stats().Roots[0].Used, 0)
	equal(t, "bytes on the disk", onDisk(t, f.cfg.Roots[0].Path), 0)
}

// unlinkVictims keeps puts from reusing the files of victims.
func (f *fixture) unlinkVictims() { f.root().cfg.WriteOnce = true }

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
	f, fsys := faultyFixture(t, 3)
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
		f := newFixtureIn(t, filepath.Join(t.TempDir(), "root"), 1, 1)
		f.mustPut(0)
		l := f.lookup(0)
		p, err := l.Open(0, 0)
		must(t, err)
		other := f.cfg.Roots[0].Path + "-backup"
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
		f := newFixture(t, 1, 1, func(c *Config) { c.FS = fsys })
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
		f := newFixture(t, 2, 1)
		q := f.request(0, 0, 0)
		q.Group = 1 // larger files
		must(t, f.putAs(q))
		f.mustPut(1, 2)
		f.mustHold(1)
		f.mustHold(2)
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
			f, fsys := faultyFixture(t, 2)
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
		f, fsys := faultyFixture(t, 2)
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
		f := newFixture(t, 1, 1)
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

// emptyDirs are the directories of pieces in which there is nothing.
func (f *fixture) emptyDirs() (empty []string) {
	f.Helper()
	root := f.cfg.Roots[0].Path
	err := filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		if err != nil || !d.IsDir() || path == root {
			return err
		}
		if strings.HasPrefix(d.Name(), pieceformat.MetaDir) {
			return fs.SkipDir
		}
		inside, err := os.ReadDir(path)
		if len(inside) == 0 {
			empty = append(empty, path)
		}
		return err
	})
	must(f, err)
	return empty
}

// A directory goes with the last piece in it, whether its file is unlinked or becomes another piece's.
func TestEmptyDirectoriesGo(t *testing.T) {
	for _, unlinks := range []bool{false, true} {
		f := newFixture(t, 3, 2)
		if unlinks {
			f.unlinkVictims()
		}
		for n := range uint64(20) {
			f.mustPut(n)
			if empty := f.emptyDirs(); len(empty) > 0 {
				t.Fatalf("unlinks %v: after key %d nothing is in %v", unlinks, n, empty)
			}
		}
		if reused := f.recycled() > 0; reused == unlinks {
			t.Errorf("unlinks %v: %d files were taken over", unlinks, f.recycled())
		}
		f.restart()
		for n := uint64(17); n < 20; n++ {
			f.mustHold(n)
		}
	}
}

// undoing removes each directory as soon as it was made, so many times, as the eviction of its only piece would.
type undoing struct {
	staging.FS
	left atomic.Int32
}

func (u *undoing) MkdirAll(name string, perm fs.FileMode) error {
	err := u.FS.MkdirAll(name, perm)
	if err == nil && strings.Contains(name, "/kv/") && !strings.Contains(name, pieceformat.MetaDir) && u.left.Add(-1) >= 0 {
		err = u.FS.Remove(name)
	}
	return err
}

// A put whose directory goes before its file is there makes it again.
func TestADirectoryGoesBeforeItsFile(t *testing.T) {
	for _, strict := range []bool{false, true} {
		fsys := &undoing{FS: staging.OS()}
		f := newFixtureIn(t, filepath.Join(t.TempDir(), "kv"), 3, 1, func(c *Config) { c.FS, c.Strict = fsys, strict })
		for n := range uint64(9) { // the last ones take files over
			fsys.left.Store(3)
			f.mustPut(n)
			if fsys.left.Load() >= 3 {
				t.Fatal("no directory went")
			}
			f.mustHold(n)
		}
	}
}

// Where a place policy makes five directories for each piece, the pieces and the directories stay within the capacity and
// what is tolerated, also after a start.
func TestDirectoriesStayWithinTheCapacity(t *testing.T) {
	alone := linkedPlacer(func(q *abi.PlaceQuery, dst []byte) []byte {
		return fmt.Appendf(dst, "%x/a/b/c/d/piece", q.Key[:q.KeyLen])
	})
	const entries = 400
	f := newFixture(t, entries, 1, func(c *Config) { c.Policies.Place = alone.use("alone") })
	root := f.cfg.Roots[0]
	const block = 4096
	directories := func() (dirs int64) {
		t.Helper()
		err := filepath.WalkDir(root.Path, func(_ string, d os.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				dirs++
			}
			return err
		})
		must(t, err)
		return dirs
	}
	counted := func() { // in the background after a start; until then they leave too much for pieces
		t.Helper()
		dirs := directories()
		await(t, "the account of directories is the disk's", func() bool {
			return f.root().Account.Figures().Limit == root.Capacity-max(0, dirs*block-1<<20)
		})
	}
	within := func() {
		t.Helper()
		counted()
		pieces, _ := usage(t, root.Path)
		dirs := directories()
		const tolerated = 1<<20 + 6*block // and those of the latest piece
		if over := pieces + dirs*block - root.Capacity - tolerated; over > 0 || dirs < 200 {
			t.Errorf("%d bytes of pieces and %d directories: %d bytes too many for %d", pieces, dirs, over, root.Capacity)
		}
	}
	f.mustPut(upTo(2 * entries)...)
	within()
	f.cfg.Policies.Place = alone.use("alone") // the fixture released it
	f.restart()
	counted()
	for n := range uint64(entries) {
		f.mustPut(1<<20 + n)
	}
	within()
}
