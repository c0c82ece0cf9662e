package files

import (
	"errors"
	"fmt"
	"testing"
	"testing/synctest"

	"github.com/kvhost/kvhost/host/internal/store/capacity"
)

// TestOrphansAreBounded: the list takes so many and no more, and nothing is left of those that are gone.
func TestOrphansAreBounded(t *testing.T) {
	var l Orphans
	l.init(nil)
	for n := range maxOrphans {
		l.add(&Orphan{name: fmt.Sprint("/root/", n)})
	}
	l.add(&Orphan{name: "/root/more"})
	if l.Has("/root/more") || !l.Has(fmt.Sprint("/root/", maxOrphans-1)) || l.Has("/other/7") {
		t.Error("the list takes one more than its bound, or does not know what it has")
	}
	for o := l.first(); o != nil; o = l.first() {
		l.deleted(o, nil)
	}
	if len(l.by) > 0 {
		t.Errorf("%d names are left of an empty list", len(l.by))
	}
}

// TestClaimWaitsForAnUnlink: a put that needs an orphan's name gets it when the orphan is no longer being unlinked. One that
// could not be is still listed, and tried again.
func TestClaimWaitsForAnUnlink(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var l Orphans
		l.init(nil)
		l.add(&Orphan{name: "/root/a"})
		o := l.first()
		var got []*Orphan
		claimed := false
		go func() { got, claimed = l.Claim("/root/a"), true }()
		synctest.Wait()
		if claimed {
			t.Error("an orphan was claimed while it is being unlinked, want the claim to wait")
		}
		l.deleted(o, errors.New("it stays"))
		synctest.Wait()
		if !claimed || len(got) != 1 || l.len() != 0 {
			t.Errorf("claimed %t: %d orphans, %d to be tried, want the one, and none", claimed, len(got), l.len())
		}
		if l.unclaim(o, false); l.first() != o {
			t.Error("the orphan is not tried again after its claim, want it first in the list")
		}
	})
}

// TestAFileInQuarantineIsBookedOnce: two looks at the quarantine may meet a file at the same time.
func TestAFileInQuarantineIsBookedOnce(t *testing.T) {
	account := capacity.New(capacity.Config{})
	var q Quarantine
	q.init(&Dir{account: account}, Config{QuarantineFiles: 2, QuarantineBytes: 100})
	for range 2 {
		q.enter(Kept{name: "a", Bytes: 7}, true)
	}
	if got := account.Figures().Quarantine; got != 7 || q.Count() != 1 {
		t.Errorf("%d bytes and %d files are booked, want 7 and 1", got, q.Count())
	}
}
