package store

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/staging/faultfs"
	"golang.org/x/sys/unix"
)

// A rename can report an error although it happened, and the look that would tell can fail as well.

// TestPublicationInDoubt: neither the publication nor the look at its name says what became of the file. Its bytes stay
// in the account until it is gone.
func TestPublicationInDoubt(t *testing.T) {
	for rule, there := range map[string]bool{"publish ** 1st: eio after": true, "publish ** 1st: eio": false} {
		t.Run(rule, func(t *testing.T) {
			f, faulty := faultyFixture(t, 4)
			faulty.Set(faultfs.MustRules(rule + "\nstat **.kv 1st: estale")...)
			if err := f.put(0, 0); !errors.Is(err, unix.EIO) {
				t.Fatal(err)
			}
			faulty.Set()
			r := f.root()
			if disk, _ := usage(t, r.Path); disk > 0 != there || r.Account.Figures().Used != pieceBytes {
				t.Errorf("%d bytes on disk, the account says %d", disk, r.Account.Figures().Used)
			}
			f.maintain(RetryRemovals)
			if disk, _ := usage(t, r.Path); disk != 0 || r.Account.Figures().Used != 0 {
				t.Errorf("%d bytes on disk, the account says %d, and it was tried again", disk, r.Account.Figures().Used)
			}
		})
	}
}

// colliding names all pieces alike.
func colliding(c *Config) {
	c.Policies.Place = linkedPlacer(func(_ *abi.PlaceQuery, dst []byte) []byte {
		return fmt.Append(dst, "heap/same.kv")
	}).use("collides")
}

// TestPublicationInDoubtUnderATakenName: what is removed is the put's own file, not the piece that has the name.
func TestPublicationInDoubtUnderATakenName(t *testing.T) {
	f, faulty := faultyFixture(t, 4, colliding)
	f.mustPut(0)
	faulty.Set(faultfs.MustRules("publish ** 1st: eio\nstat **.kv 1st: estale")...)
	if err := f.put(1, 0); !errors.Is(err, unix.EIO) {
		t.Fatal(err)
	}
	faulty.Set()
	r := f.root()
	if r.Orphans.Has(f.pieceFile(0, 0)) {
		t.Error("a scan would leave the piece out")
	}
	f.maintain(RetryRemovals)
	f.mustRead(0)
	f.checkUsed()
}

// TestNameOfAnOrphan: a put leaves the name that its place policy gave because an orphan of another key has it. The
// orphan stays one.
func TestNameOfAnOrphan(t *testing.T) {
	f, faulty := faultyFixture(t, 4, colliding)
	f.mustPut(0)
	faulty.Set(faultfs.MustRules("remove **: eacces")...)
	f.drop(0)
	f.must(f.put(1, 0))
	f.checkUsed()
	faulty.Set()
	f.maintain(RetryRemovals)
	f.mustRead(1)
	f.checkUsed()
	equal(t, "Used", f.store.Stats().Roots[0].Used, pieceBytes)
}

// TestOrphanOfAPutUnderWay: a put has claimed the name of an orphan. What stands there is in the account once.
func TestOrphanOfAPutUnderWay(t *testing.T) {
	f, faulty := faultyFixture(t, 4, colliding, func(c *Config) { c.IOTimeout, c.UpkeepEvery = -1, time.Hour })
	f.mustPut(0)
	name := f.pieceFile(0, 0)
	faulty.Set(faultfs.MustRules("remove **: eacces\npublish ** 1st: hang")...)
	release := sync.OnceFunc(faulty.Release)
	defer release()
	r := f.root()
	r.drop(f.markOf(0), 0)
	put := make(chan error, 1)
	go func() { put <- f.put(1, 0) }()
	f.must(faulty.AwaitHanging(t.Context(), 1))
	if !r.Orphans.Has(name) {
		t.Error("a scan would take the orphan in")
	}
	r.Discard(name, pieceBytes)
	equal(t, "Used", r.Account.Figures().Used, 2*pieceBytes) // the orphan, and what the put has reserved
	release()
	f.must(<-put)
	f.checkUsed()
	faulty.Set()
	f.maintain(RetryRemovals)
	f.mustRead(1)
	f.checkUsed()
	equal(t, "Used", r.Account.Figures().Used, pieceBytes)
}

// TestQuarantineInDoubt: nobody can say whether a damaged piece was moved into quarantine.
func TestQuarantineInDoubt(t *testing.T) {
	f, faulty := faultyFixture(t, 100) // a piece is no more than the quarantine's share
	f.mustPut(0, 1)
	f.must(os.Truncate(f.pieceFile(0, 0), pieceBytes/2))
	l := f.lookup(0)
	p, err := l.Open(0, 0)
	f.must(err)
	faulty.Set(faultfs.MustRules("publish **/quarantine/* 1st: eio after\nstat **/quarantine/* 1st: estale")...)
	p.Bad(errors.New("cut"))
	p.Close()
	l.Release()
	if faulty.Injected() != 2 {
		t.Fatal(faulty.Injected(), "faults")
	}
	faulty.Set()
	r := f.root()
	if disk, _ := usage(t, r.Path); r.Account.Figures().Used < disk || disk == pieceBytes {
		t.Errorf("%d bytes on disk, the account says %d", disk, r.Account.Figures().Used)
	}
	f.maintain(RetryRemovals)
	f.checkUsed()
	equal(t, "Used", f.store.Stats().Roots[0].Used, pieceBytes)
}
