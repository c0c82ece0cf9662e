package store

import (
	"context"
	"errors"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/kvhost/kvhost/staging/faultfs"
	"golang.org/x/sys/unix"
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
		f.Errorf("%+v", st)
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
// judged; the orphan's own key waits, so that its piece is not unlinked.
func TestPublishBesideADeletion(t *testing.T) {
	f, faulty := faultyFixture(t, 8, func(c *Config) { c.IOTimeout, c.UpkeepEvery = -1, time.Hour })
	f.mustPut(0, 1)
	r := f.root()
	faulty.Set(faultfs.MustRules("remove **: eacces")...)
	r.drop(f.markOf(0), 0)
	faulty.Set(faultfs.MustRules("remove **: hang")...)
	release := sync.OnceFunc(faulty.Release)
	defer release()
	var deleting sync.WaitGroup
	deleting.Go(func() { f.maintain(RetryRemovals) })
	ctx, stop := context.WithTimeout(t.Context(), time.Minute)
	defer stop()
	f.must(faulty.AwaitHanging(ctx, 1))

	other, same := make(chan error, 1), make(chan error, 1)
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
	go func() { same <- f.put(0, 0) }()
	release()
	f.must(<-same)
	deleting.Wait()
	f.mustRead(0, 2)
	f.checkUsed()
}

// TestStraysGo: what would not be unlinked is tried again, and its bytes are free then.
func TestStraysGo(t *testing.T) {
	f, faulty := faultyFixture(t, 4, func(c *Config) { c.QuarantineFiles = -1 })
	f.unlinkVictims()
	f.mustPut(0, 1, 2, 3)
	faulty.Set(faultfs.MustRules("remove **: eacces\nstat **.kv: eacces")...)
	if err := f.put(4, 0); !errors.Is(err, ErrNoSpace) {
		t.Error(err)
	}
	if got := f.store.Stats().Roots[0]; got.Orphaned != pieceBytes {
		t.Errorf("%d bytes of orphans, and nobody could say that the file is gone", got.Orphaned)
	}
	faulty.Set()
	f.maintain(RetryRemovals)
	if got := f.store.Stats().Roots[0]; got.Orphaned != 0 || got.Used != 3*pieceBytes {
		t.Errorf("%+v", got)
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
		t.Errorf("%+v", got)
	}
	f.checkUsed()
}
