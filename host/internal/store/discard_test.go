package store

import (
	"errors"
	"os"
	"slices"
	"testing"

	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
)

// discards discards keys and compares the results.
func (f *fixture) discards(ns []uint64, want ...DiscardResult) {
	f.Helper()
	got, err := f.store.Discard(DiscardRequest{Namespace: f.space, Keys: keys(ns...)})
	must(f, err)
	if !slices.Equal(got, want) {
		f.Errorf("discard of %d: %d, want %d", ns, got, want)
	}
}

// Discarded entries are gone with the files of all ranks, also after a restart, and can be stored again.
func TestDiscard(t *testing.T) {
	f := newFixture(t, 10, 2)
	f.mustPut(0, 1, 2, 3)
	f.mustPut(4)
	at := f.store.Changes().Start()
	f.discards([]uint64{3, 7, 1, 3}, DiscardRemoved, DiscardAbsent, DiscardRemoved, DiscardAbsent)
	if f.has(1) || f.has(3) || !f.has(0) || !f.has(2) {
		t.Error("other keys are there than should be")
	}
	for rank := range uint32(2) {
		if _, err := os.Stat(f.pieceFile(3, rank)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the file of rank %d: %v", rank, err)
		}
	}
	f.checkUsed()
	st := f.store.Stats().Roots[0]
	equal(t, "entries", st.Entries, 3)
	equal(t, "discarded", st.Discarded, 2)
	changes, _, err := f.store.Changes().Read(at, make([]entries.Change, 0, 8))
	must(t, err)
	var gone []uint64
	for _, c := range changes {
		if c.Kind == entries.Evicted {
			gone = append(gone, uint64(slices.Index(keys(0, 1, 2, 3, 4), c.Key)))
		}
	}
	if !slices.Equal(gone, []uint64{3, 1}) {
		t.Errorf("the log says that %d went", gone)
	}
	f.mustPut(3)
	f.mustRead(3)
	f.restart()
	if f.has(1) {
		t.Error("a discarded entry is back after a restart")
	}
	f.mustRead(3)
}

// What is leased, being loaded or being stored stays, and is removed when asked for again.
func TestDiscardInUse(t *testing.T) {
	f := newFixture(t, 10, 1)
	f.mustPut(0)
	l := f.lookup(0)
	f.discards([]uint64{0}, DiscardInUse)
	p, err := l.Open(0, 0)
	must(t, err)
	l.Release()
	f.discards([]uint64{0}, DiscardInUse)
	p.Close()
	f.discards([]uint64{0}, DiscardRemoved)

	put, err := f.store.Put(t.Context(), f.request(1, 1, 0))
	must(t, err)
	f.discards([]uint64{1}, DiscardInUse)
	must(t, errors.Join(write(put), put.Publish(t.Context())))
	f.mustRead(1)
	f.discards([]uint64{1}, DiscardRemoved)
	f.checkUsed()
}

// A tenant cannot remove what another one stored.
func TestDiscardOfAnotherTenant(t *testing.T) {
	f := newFixture(t, 10, 1)
	f.mustPut(0)
	q := DiscardRequest{Namespace: f.space, Keys: keys(0), Tenant: 7}
	if got, err := f.store.Discard(q); err != nil || got[0] != DiscardOtherTenant {
		t.Errorf("discard of another tenant's entry: result %d, error %v, want %d", got, err, DiscardOtherTenant)
	}
	f.mustRead(0)
	q.Group = 99
	if got, err := f.store.Discard(q); !errors.Is(err, ErrUnknownNamespace) {
		t.Errorf("an unknown group: %d, %v", got, err)
	}
}

// Nobody can say of a key that it is absent while a scan has not seen all files.
func TestDiscardWhileScanning(t *testing.T) {
	f := newFixture(t, 10, 1)
	f.mustPut(0, 1)
	g := f.reopenGated()
	f.discards([]uint64{0}, DiscardUnavailable)
	f.mustPut(5)
	f.discards([]uint64{5}, DiscardRemoved)
	close(g.gate)
	<-f.store.ScanDone()
	f.discards([]uint64{0, 5}, DiscardRemoved, DiscardAbsent)
	f.mustRead(1)
	f.checkUsed()
}

// A file that cannot be unlinked is no hit any more, and its bytes stay in the account until it is gone.
func TestDiscardThatCannotUnlink(t *testing.T) {
	f, faults := faultyFixture(t, 10)
	f.mustPut(0)
	faults.Set(faultfs.MustRules("remove **: eio")...)
	f.discards([]uint64{0}, DiscardRemoved)
	if f.has(0) {
		t.Error("it is a hit")
	}
	f.checkUsed()
	faults.Set()
	must(t, f.store.Maintain(t.Context(), 0, RetryRemovals))
	equal(t, "used", f.store.Stats().Roots[0].Used, 0)
	f.checkUsed()
}
