package store

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"

	"github.com/kvhost/kvhost/staging/faultfs"
	"golang.org/x/sys/unix"
)

// TestUnusableFiles lets a piece fail to open. The entry goes, unless it is the host that is short of something.
func TestUnusableFiles(t *testing.T) {
	for rule, keeps := range map[string]bool{
		"open **_r* 1st: eio": false, "open **_r*: eacces": false, "stat **_r* 1st: eio": false, "stat **_r*: eio": false,
		"open **_r* 1st: emfile": true, "open **_r* 1st: enomem": true,
	} {
		t.Run(rule, func(t *testing.T) {
			f, faulty := faultyFixture(t, 40)
			f.mustPut(0, 1)
			l := f.lookup(0)
			faulty.Set(faultfs.MustRules(rule)...)
			_, err := l.Open(0, 0)
			faulty.Set()
			l.Release()
			if err == nil || errors.Is(err, ErrGone) == keeps {
				t.Errorf("open: %v", err)
			}
			if got := f.has(0); got != keeps {
				t.Errorf("hit %t, want %t", got, keeps)
			}
			f.checkUsed()
			f.mustPut(2)
			if !keeps {
				f.mustPut(0)
			}
			f.mustRead(0)
		})
	}
}

// TestPutBesideACondemnedEntrysReader has a reader stay on an entry that was condemned while a piece of it was written.
func TestPutBesideACondemnedEntrysReader(t *testing.T) {
	f := newFixture(t, t.TempDir(), 4, 2)
	must(t, f.put(1, 0))
	l, err := f.store.Lookup(LookupRequest{Namespace: f.space, Keys: keys(1), Ranks: 1})
	if err != nil || l.Hits() != 1 {
		t.Fatal(l, err)
	}
	defer l.Release()
	p, err := f.store.Put(context.Background(), f.request(1, 0, 1))
	must(t, err)
	piece, err := l.Open(0, 0)
	must(t, err)
	piece.Bad(errors.New("on purpose"))
	piece.Close()
	p.Abort(errors.New("on purpose"))
	if err := f.put(1, 0); err != nil { // it does not wait for somebody else's lease
		t.Error(err)
	}
}

// TestPutHonoursItsContext cancels a put that waits for an unlink.
func TestPutHonoursItsContext(t *testing.T) { synctest.Test(t, testPutHonoursItsContext) }

func testPutHonoursItsContext(t *testing.T) {
	f, faulty := faultyFixture(t, 4)
	f.mustPut(1)
	l := f.lookup(1)
	faulty.Set(faultfs.MustRules("rename,publish,remove ** 1st: hang")...)
	defer faulty.Release()
	p, err := l.Open(0, 0)
	must(t, err)
	bad := make(chan struct{})
	go func() { p.Bad(unix.EIO); close(bad) }()
	f.must(faulty.AwaitHanging(t.Context(), 1))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { _, err := f.store.Put(ctx, f.request(1, 0, 0)); done <- err }()
	synctest.Wait() // it waits
	select {
	case err := <-done:
		t.Errorf("the put ended while the entry's file was being unlinked: %v", err)
	default:
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want that the put was cancelled", err)
	}
	faulty.Release()
	<-bad
	p.Close()
	l.Release()
}
