package store

import (
	"context"
	"errors"
	"testing"
	"time"

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
	if err := f.put(1, 0); err != nil {
		t.Fatal(err)
	}
	l, err := f.store.Lookup(LookupRequest{Space: f.space, Keys: keys(1), Ranks: 1})
	if err != nil || l.Hits() != 1 {
		t.Fatal(l, err)
	}
	defer l.Release()
	p, err := f.store.Put(context.Background(), f.request(1, 0, 1))
	if err != nil {
		t.Fatal(err)
	}
	piece, err := l.Open(0, 0)
	if err != nil {
		t.Fatal(err)
	}
	piece.Bad(errors.New("on purpose"))
	piece.Close()
	p.Abort(errors.New("on purpose"))
	done := make(chan error, 1)
	go func() { done <- f.put(1, 0) }()
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(5 * time.Second):
		t.Error("the put waits for somebody else's lease")
	}
}

// TestPutHonoursItsContext cancels a put that waits for an unlink.
func TestPutHonoursItsContext(t *testing.T) {
	f, faulty := faultyFixture(t, 4)
	f.mustPut(1)
	l := f.lookup(1)
	faulty.Set(faultfs.MustRules("rename,publish,remove ** 1st: hang")...)
	defer faulty.Release()
	p, err := l.Open(0, 0)
	if err != nil {
		t.Fatal(err)
	}
	bad := make(chan struct{})
	go func() { p.Bad(unix.EIO); close(bad) }()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if err := faulty.AwaitHanging(ctx, 1); err != nil {
		t.Fatal(err)
	}
	short, stop := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer stop()
	done := make(chan error, 1)
	go func() { _, err := f.store.Put(short, f.request(1, 0, 0)); done <- err }()
	select {
	case err := <-done:
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v", err)
		}
	case <-time.After(5 * time.Second):
		t.Error("the put does not hear its context")
	}
	faulty.Release()
	<-bad
	p.Close()
	l.Release()
}
