package store

import (
	"testing"

	"github.com/kvhost/kvhost/abi"
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
	q := &f.store.requests
	if got := len(q.seen[request].list); got != keys || q.kept != keys {
		t.Errorf("%d touches are kept for %d entries, %d in all", got, keys, q.kept)
	}
	f.store.EndRequest(request, abi.Hints{})
	if len(q.seen) != 0 || q.kept != 0 {
		t.Errorf("after the request's end %d requests and %d touches are kept", len(q.seen), q.kept)
	}
}

// TestRequestBounds: requests that never end are forgotten beyond the bounds.
func TestRequestBounds(t *testing.T) {
	q := requests{seen: map[uint32]*requestTouches{}}
	for request := range uint32(maxRequests + 10) {
		q.keep(request+1, &touchLog{any: true}, make([]grant, 3))
	}
	if len(q.seen) != maxRequests || q.kept != 3*maxRequests {
		t.Errorf("%d requests with %d touches are kept", len(q.seen), q.kept)
	}
	q.keep(1<<31, &touchLog{any: true}, make([]grant, maxTouches-100))
	if q.kept > maxTouches {
		t.Errorf("%d touches are kept", q.kept)
	}
}
