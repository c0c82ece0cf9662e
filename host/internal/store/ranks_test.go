package store

import (
	"context"
	"errors"
	"testing"
)

// putRanks stores one piece of key n on behalf of an engine with a local run of ranks.
func (f *fixture) putRanks(n uint64, rank uint32, ranks uint64) error {
	q := f.request(n, n, rank)
	q.Ranks = ranks
	p, err := f.store.Put(context.Background(), q)
	if err != nil {
		return err
	}
	if err := write(p); err != nil {
		p.Abort(err)
		return err
	}
	return p.Publish(context.Background())
}

func (f *fixture) hasRanks(n, ranks uint64) bool {
	f.Helper()
	l, err := f.store.Lookup(LookupRequest{Namespace: f.space, Keys: keys(n), Ranks: ranks})
	must(f, err)
	defer l.Release()
	return l.Hits() == 1
}

// TestEnginesShareEntries has two engines with different local ranks store the same keys. What the second one adds is
// reserved like what the first one did, before and after a restart.
func TestEnginesShareEntries(t *testing.T) {
	f := newFixture(t, t.TempDir(), 2, 4) // room for 8 pieces
	within := func(when string) {
		t.Helper()
		if err := f.check(); err != nil {
			t.Fatalf("%s: %v", when, err)
		}
		f.checkUsed()
	}
	const low, high = 0b0011, 0b1100
	must := func(err error) {
		t.Helper()
		must(t, err)
	}
	for n := range uint64(4) {
		must(f.putRanks(n, 0, low))
		must(f.putRanks(n, 1, low))
	}
	within("one engine")
	if used := f.store.Stats().Roots[0].Used; used != 8*pieceBytes {
		t.Fatalf("%d bytes used, the pieces take %d", used, 8*pieceBytes)
	}
	must(f.putRanks(3, 2, high)) // evicts 0
	within("a third rank")
	if f.hasRanks(3, high) || f.hasRanks(3, 0) || !f.hasRanks(3, low) || f.hasRanks(0, low) {
		t.Error("key 3 must be there for the first engine only, and key 0 gone")
	}
	must(f.putRanks(3, 3, high))
	within("a fourth rank")
	if !f.hasRanks(3, high) || !f.hasRanks(3, 0) {
		t.Error("key 3 is whole and a miss")
	}
	must(f.putRanks(2, 3, high))
	must(f.putRanks(2, 2, high))
	within("another key")
	if !f.hasRanks(3, 0) || !f.hasRanks(2, 0) || f.hasRanks(1, low) {
		t.Error("keys 2 and 3 fill the root")
	}
	f.restart()
	within("restarted")
	if !f.hasRanks(3, 0) || !f.hasRanks(2, 0) {
		t.Error("a restart lost something")
	}
	if used := f.store.Stats().Roots[0].Used; used != 8*pieceBytes {
		t.Errorf("%d bytes used after the restart, the pieces take %d", used, 8*pieceBytes)
	}
}

// TestRecoveredEntriesAreReserved finds pieces of two engines at the start, each with one rank missing.
func TestRecoveredEntriesAreReserved(t *testing.T) {
	f := newFixture(t, t.TempDir(), 1, 4)
	must(t, errors.Join(f.putRanks(1, 0, 0b0011), f.putRanks(1, 2, 0b1100)))
	f.crash()
	r := f.root()
	if used := f.store.Stats().Roots[0].Used; used != 4*pieceBytes {
		t.Errorf("%d bytes used, the entry will take %d", used, 4*pieceBytes)
	}
	must(t, errors.Join(f.putRanks(1, 3, 0b1100), f.putRanks(1, 1, 0b0011)))
	if !f.hasRanks(1, 0) || len(r.Index.MissingByClass()) != 0 {
		t.Errorf("the entry is not whole; %v are missing", r.Index.MissingByClass())
	}
	f.checkUsed()
}

// TestNoSpaceForAnotherRank pins all there is: a rank that was not reserved is shed, and what is there stays.
func TestNoSpaceForAnotherRank(t *testing.T) {
	f := newFixture(t, t.TempDir(), 1, 2)
	must(t, errors.Join(f.putRanks(1, 0, 0b01), f.putRanks(2, 0, 0b01)))
	l, err := f.store.Lookup(LookupRequest{Namespace: f.space, Keys: keys(1), Ranks: 1})
	if err != nil || l.Hits() != 1 {
		t.Fatal(l, err)
	}
	held, err := f.store.Lookup(LookupRequest{Namespace: f.space, Keys: keys(2), Ranks: 1})
	if err != nil || held.Hits() != 1 {
		t.Fatal(held, err)
	}
	if err := f.putRanks(1, 1, 0b10); !errors.Is(err, ErrNoSpace) {
		t.Errorf("put of a rank that does not fit: %v", err)
	}
	l.Release()
	held.Release()
	if !f.hasRanks(1, 1) || !f.hasRanks(2, 1) {
		t.Error("what was there is gone")
	}
	f.checkUsed()
	noError(t, f.idle())
}
