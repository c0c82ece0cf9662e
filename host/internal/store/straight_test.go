package store

import (
	"context"
	"errors"
	"testing"

	"github.com/kvhost/kvhost/abi"
)

func TestStoreAndLoad(t *testing.T) {
	f := newFixture(t, t.TempDir(), 8, 2)
	if got := f.space.Plan(0).PayloadBytes(); got != 8000 {
		t.Fatalf("payload of %d bytes", got)
	}
	f.mustPut(0, 1, 2)
	f.mustRead(upTo(3)...)
	if l := f.lookup(0, 1, 9, 2); l.Hits() != 2 || !l.Has(1) || l.Has(2) || l.Has(3) {
		t.Errorf("%d hits", l.Hits())
	} else {
		l.Release()
		l.Release()
		if _, err := l.Open(0, 0); !errors.Is(err, ErrLeaseOver) {
			t.Errorf("open after release: %v", err)
		}
	}
	if err := f.put(1, 0); !errors.Is(err, ErrResident) {
		t.Errorf("put of a resident piece: %v", err)
	}
	f.checkUsed()
	f.restart()
	f.mustRead(upTo(3)...)
	f.checkUsed()
}

func TestEntryNeedsAllPieces(t *testing.T) {
	f := newFixture(t, t.TempDir(), 8, 2)
	must(t, f.put(0, 1))
	if f.has(0) {
		t.Error("a hit with one of two pieces")
	}
	if got := f.store.Stats().Roots[0].Used; got != 2*pieceBytes {
		t.Errorf("%d bytes reserved, want the whole entry", got)
	}
	l, err := f.store.Lookup(LookupRequest{Namespace: f.space, Keys: keys(0), Ranks: 2})
	if err != nil || l.Hits() != 1 {
		t.Errorf("lookup of rank 1 alone: %v", err)
	}
	l.Release()
	f.restart()
	if f.has(0) {
		t.Error("a hit with one of two pieces after a restart")
	}
	must(t, f.put(0, 0))
	f.mustRead(0)
	f.checkUsed()
}

func TestAbort(t *testing.T) {
	f := newFixture(t, t.TempDir(), 1, 1)
	ctx := context.Background()
	p, err := f.store.Put(ctx, f.request(0, 0, 0))
	must(t, err)
	if _, err := f.store.Put(ctx, f.request(0, 0, 0)); !errors.Is(err, ErrResident) {
		t.Errorf("a second put of a piece in flight: %v", err)
	}
	if _, err := f.store.Put(ctx, f.request(1, 0, 0)); !errors.Is(err, ErrNoSpace) {
		t.Errorf("a put beside the one that fills the root: %v", err)
	}
	must(t, write(p))
	p.Abort(errors.New("on purpose"))
	p.Abort(errors.New("again"))
	if err := p.Publish(ctx); !errors.Is(err, ErrPutOver) {
		t.Errorf("publish after abort: %v", err)
	}
	if got := f.store.Stats().Roots[0]; got.Used != 0 || got.Entries != 0 || got.Writing != 0 {
		t.Errorf("after abort: %+v", got)
	}
	f.checkUsed()
	f.mustPut(1)
	f.mustRead(1)
}

// TestAfterClose lets go of what a client still held when the store was closed.
func TestAfterClose(t *testing.T) {
	f := newFixture(t, t.TempDir(), 4, 1)
	f.mustPut(0, 1)
	l := f.lookup(0)
	piece, err := l.Open(0, 0)
	must(t, err)
	p, err := f.store.Put(context.Background(), f.request(2, 1, 0))
	must(t, err)
	must(t, f.store.Close())
	p.Abort(errors.New("the session ended"))
	piece.Close()
	l.Release()
	f.store.EndRequest(1, abi.Hints{})
	if _, err := f.store.Lookup(LookupRequest{Namespace: f.space, Keys: keys(0)}); !errors.Is(err, ErrClosed) {
		t.Errorf("lookup after close: %v", err)
	}
	if _, err := f.store.Put(context.Background(), f.request(3, 2, 0)); !errors.Is(err, ErrClosed) {
		t.Errorf("put after close: %v", err)
	}
	if got := f.store.Stats().Roots[0].EvictFaults; got != 0 {
		t.Errorf("%d evict policies replaced", got)
	}
	f.start()
	f.mustRead(0, 1)
	f.checkUsed()
}
