package store

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
)

// TestRequestMemory: a client that uses one request id for all its lookups makes the host remember each entry once.
func TestRequestMemory(t *testing.T) {
	const keys, request = 120, 5
	f := newFixture(t, t.TempDir(), keys, 1)
	all := make([]uint64, keys)
	for n := range all {
		all[n] = uint64(n)
		f.mustPut(uint64(n))
	}
	lookup := func(ns ...uint64) {
		t.Helper()
		q := LookupRequest{Namespace: f.space, Request: request}
		for _, n := range ns {
			q.Keys = append(q.Keys, testKey(n))
		}
		l, err := f.store.Lookup(q)
		if err != nil || l.Hits() != len(ns) {
			t.Fatalf("%d hits of %d: %v", l.Hits(), len(ns), err)
		}
		l.Release()
	}
	for n := range all {
		lookup(all[:n+1]...)
		lookup(all[n])
	}
	if requests, touches := f.store.requests.Len(); requests != 1 || touches != keys {
		t.Errorf("%d touches of %d requests are kept for %d entries", touches, requests, keys)
	}
	f.store.EndRequest(request, abi.Hints{})
	if requests, touches := f.store.requests.Len(); requests != 0 || touches != 0 {
		t.Errorf("after the request's end %d requests and %d touches are kept", requests, touches)
	}
}

// TestRequestBounds: requests that never end are forgotten beyond the bounds.
func TestRequestBounds(t *testing.T) {
	q := newTouchRecord()
	for request := range uint32(maxRequests + 10) {
		q.Keep(request+1, &touchLog{any: true}, make([]grant, 3))
	}
	if len(q.seen) != maxRequests || q.kept != 3*maxRequests {
		t.Errorf("%d requests with %d touches are kept", len(q.seen), q.kept)
	}
	q.Keep(1<<31, &touchLog{any: true}, make([]grant, maxTouches-100))
	if q.kept > maxTouches {
		t.Errorf("%d touches are kept", q.kept)
	}
}

// order is the keys by their last touch.
func (f *fixture) order(of int) (list []int) {
	number := map[uint64]int{}
	for n := range of {
		k := testKey(uint64(n))
		number[f.space.Class(0).Printer.Print(&k)] = n
	}
	for _, e := range f.root().Evictor.Snapshot() {
		list = append(list, number[e.Fingerprint])
	}
	return list
}

// TestOrderOfTouchAfterACrash kills a host some time after the order was kept: what it says holds of what is still
// there, and what was stored later is newer.
func TestOrderOfTouchAfterACrash(t *testing.T) {
	synctest.Test(t, testOrderOfTouchAfterACrash)
}

func testOrderOfTouchAfterACrash(t *testing.T) {
	f := newFixture(t, t.TempDir(), 16, 1)
	name := filepath.Join(f.cfg.Roots[0].Path, pieceformat.TouchesFile)
	f.mustPut(0, 1, 2, 3, 4)
	for _, n := range []uint64{3, 0} {
		f.lookup(n).Release()
	}
	want := []int{1, 2, 4, 3, 0}
	if got := f.order(5); !slices.Equal(got, want) {
		t.Fatalf("order of last touch %v, want %v", got, want)
	}
	var list []byte
	for size := int64(32 + 5*8); ; time.Sleep(touchesEvery) { // the store does it by itself
		if info, err := os.Stat(name); err == nil && info.Size() == size {
			f.root().recovery.saveTouches() // the one before may have come between two touches
			if list, err = os.ReadFile(name); err != nil {
				t.Fatal(err)
			}
			break
		}
	}
	f.mustPut(5, 6)
	f.lookup(1).Release()
	f.drop(4)
	must(t, f.store.Close())
	must(t, os.Remove(filepath.Join(f.cfg.Roots[0].Path, pieceformat.CheckpointFile)))
	put(t, name, list)
	f.start()
	<-f.store.ScanDone()
	if got, want := f.order(7), []int{1, 2, 3, 0, 5, 6}; !slices.Equal(got, want) {
		t.Errorf("after the crash %v, want %v", got, want)
	}
}
