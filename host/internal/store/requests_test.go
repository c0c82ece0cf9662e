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
	if requests, touches := f.store.requests.Len(); requests != 1 || touches != keys {
		t.Errorf("%d touches of %d requests are kept for %d entries", touches, requests, keys)
	}
	f.store.EndRequest(request, abi.Hints{})
	if requests, touches := f.store.requests.Len(); requests != 0 || touches != 0 {
		t.Errorf("after the request's end %d requests and %d touches are kept", requests, touches)
	}
}
