package store

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
)

// TestRequestMemory: a client that uses one request id for all its lookups makes the host remember each entry once.
func TestRequestMemory(t *testing.T) {
	const keys, request = 120, 5
	f := newFixture(t, keys, 1)
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
	q := &touchRecord{seen: map[uint32]*touches{}}
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

// TestOrderAfterACrash starts without a checkpoint: the order of storing stands for the order of last touch.
func TestOrderAfterACrash(t *testing.T) {
	f := newFixture(t, 16, 1)
	for _, n := range []uint64{3, 1, 4, 0, 2} {
		f.mustPut(n)
	}
	f.lookup(1).Release()
	if got, want := f.order(5), []int{3, 4, 0, 2, 1}; !slices.Equal(got, want) {
		t.Fatalf("order of last touch %v, want %v", got, want)
	}
	must(t, f.store.Close())
	must(t, os.Remove(filepath.Join(f.cfg.Roots[0].Path, pieceformat.CheckpointFile)))
	f.start()
	<-f.store.ScanDone()
	if got, want := f.order(5), []int{3, 1, 4, 0, 2}; !slices.Equal(got, want) {
		t.Errorf("after the crash %v, want %v", got, want)
	}
}
