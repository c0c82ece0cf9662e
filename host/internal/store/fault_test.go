package store

import (
	"context"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/staging"
	"github.com/kvhost/kvhost/staging/faultfs"
	"golang.org/x/sys/unix"
)

func faultyFixture(t *testing.T, entries int, change ...func(*Config)) (*fixture, *faultfs.FS) {
	faulty := faultfs.New(staging.OS())
	return newFixture(t, t.TempDir(), entries, 1, append(change, func(c *Config) { c.FS = faulty })...), faulty
}

// TestFaults lets one operation fail in each step of a put. Nothing is left behind, and the next try works.
func TestFaults(t *testing.T) {
	tests := []struct {
		rule string
		want error // nil: the put works all the same
	}{
		{"open **.tmp 1st: enospc", unix.ENOSPC},
		{"open **.tmp 1st: eio after", unix.EIO},
		{"mkdir ** 1st: enospc", unix.ENOSPC},
		{"write **.tmp 1st: enospc", unix.ENOSPC},
		{"write **.tmp 1st: short 4096", faultfs.ErrInjected},
		{"sync **.tmp 1st: eio", ErrSync},
		{"close **.tmp 1st: eio after", unix.EIO},
		{"publish ** 1st: erofs", unix.EROFS},
		{"publish ** 1st: eio after", nil},
		{"publish ** 1st: eio after\nstat **.kv 1st: estale", unix.EIO},
		{"syncdir **/??/? 1st: eio", ErrSync},
	}
	for _, tt := range tests {
		t.Run(tt.rule, func(t *testing.T) {
			f, faulty := faultyFixture(t, 4, func(c *Config) { c.Strict = true })
			faulty.Set(faultfs.MustRules(tt.rule)...)
			if err := f.put(1, 0); !errors.Is(err, tt.want) {
				t.Errorf("got %v, want %v", err, tt.want)
			}
			if faulty.Injected() == 0 {
				t.Fatal("the rule struck nothing")
			}
			faulty.Set()
			f.backIn()
			f.checkUsed()
			if tt.want != nil {
				if f.has(1) {
					t.Error("a hit after a failed put")
				}
				f.mustPut(1)
			}
			f.mustRead(1)
			f.checkUsed()
			f.restart()
			f.mustRead(1)
		})
	}
}

// TestFullDisk fills a small real file system below the configured capacity, if one can be mounted here; the errors are
// the file system's own.
func TestFullDisk(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=400k"); err != nil {
		t.Logf("no mount here (%v): by injection", err)
		f, faulty := faultyFixture(t, 100)
		faulty.Set(faultfs.MustRules("write **.tmp 10th: enospc")...)
		fillDisk(t, f)
		return
	}
	t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
	fillDisk(t, newFixture(t, dir, 100, 1))
}

func fillDisk(t *testing.T, f *fixture) {
	full := 0
	for n := range uint64(60) {
		err := f.put(n, 0)
		if errors.Is(err, unix.ENOSPC) {
			full++
		} else if err != nil {
			t.Fatal(err)
		}
	}
	if full == 0 {
		t.Fatal("the disk never filled")
	}
	if full > 2 {
		t.Errorf("%d stores failed; the first should have shown how much there is", full)
	}
	f.checkUsed()
	st := f.store.Stats().Roots[0]
	if st.State != health.Full || st.Limit >= st.Capacity || st.Used > st.Limit || st.Evictions == 0 {
		t.Errorf("%+v", st)
	}
	for n := uint64(55); n < 60; n++ { // what was stored since, in the place of others
		f.mustRead(n)
	}
	noError(t, f.idle())
}

func TestFilesRemovedOutside(t *testing.T) {
	f := newFixture(t, t.TempDir(), 3, 2)
	f.mustPut(0, 1, 2)
	must(t, os.Remove(f.pieceFile(1, 1)))
	l := f.lookup(0, 1, 2)
	if _, err := l.Open(1, 1); !errors.Is(err, ErrGone) {
		t.Errorf("open of a removed file: %v", err)
	}
	l.Release()
	if f.has(1) {
		t.Error("a hit although a file is gone")
	}
	if got := f.store.Stats().Roots[0]; got.Vanished < 1 || got.Entries != 2 {
		t.Errorf("%+v", got)
	}
	f.checkUsed()
	f.mustPut(1)
	must(t, os.RemoveAll(f.cfg.Roots[0].Path))
	l = f.lookup(0)
	if _, err := l.Open(0, 0); !errors.Is(err, ErrRootOut) {
		t.Errorf("open in a removed root: %v", err)
	}
	l.Release()
	if f.has(0) || f.has(2) {
		t.Error("a hit in a removed root")
	}
	if err := f.put(7, 0); !errors.Is(err, ErrRootOut) {
		t.Errorf("put in a root that was removed: %v", err)
	}
	if _, err := os.Stat(f.cfg.Roots[0].Path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the root was made again, wherever that is: %v", err)
	}
	must(t, os.Mkdir(f.cfg.Roots[0].Path, 0o700))
	f.backIn()
	if got := f.store.Stats().Roots[0]; got.Entries != 0 || got.Used != 0 {
		t.Errorf("in a root made anew: %+v", got)
	}
	f.mustPut(7)
	f.mustRead(7)
	f.checkUsed()
	f.restart()
	f.mustRead(7)
}

// TestHungUnlink has the eviction of one put hang; lookups and loads do not wait.
func TestHungUnlink(t *testing.T) {
	f, faulty := faultyFixture(t, 2)
	f.unlinkVictims()
	f.mustPut(0, 1)
	faulty.Set(faultfs.MustRules("remove,rename ** 1st: hang")...)
	done := make(chan error)
	go func() { done <- f.put(2, 0) }()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	must(t, faulty.AwaitHanging(ctx, 1))
	if f.has(0) {
		t.Error("a hit on an entry that is being unlinked")
	}
	f.mustRead(1)
	if got := f.store.Stats().Roots[0].Used; got != 2*pieceBytes {
		t.Errorf("%d bytes used while the unlink hangs", got)
	}
	faulty.Release()
	must(t, <-done)
	f.mustRead(2)
	f.checkUsed()
}

// TestUnlinkFailsForGood has every unlink fail. A put that needs room costs one entry at most, and not the whole cache.
func TestUnlinkFailsForGood(t *testing.T) {
	const entries = 10
	f, faulty := faultyFixture(t, entries)
	f.unlinkVictims()
	f.mustPut(upTo(entries)...)
	faulty.Set(faultfs.MustRules("remove **: eacces")...)
	if err := f.put(50, 0); !errors.Is(err, ErrNoSpace) || !errors.Is(err, unix.EACCES) {
		t.Errorf("got %v, want no space because unlinking is not allowed", err)
	}
	r := f.root()
	if got := f.store.Stats().Roots[0]; got.Complete < entries-1 || got.Used != got.Capacity ||
		got.Orphaned != pieceBytes {
		t.Errorf("%+v", got)
	}
	noError(t, r.idle())
	faulty.Set()
	f.mustPut(51)
	f.mustRead(51)
	f.checkUsed()
}
