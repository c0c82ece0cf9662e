package store

import (
	"context"
	"sync"
	"testing"

	"github.com/kvhost/kvhost/host/kv"
)

// TestNamespaceOpensBesideEviction evicts recovered entries of a namespace while a session opens it.
func TestNamespaceOpensBesideEviction(t *testing.T) {
	f := newFixture(t, t.TempDir(), 6, 1)
	f.mustPut(0, 1, 2, 3, 4, 5)
	old := *f.ns
	f.ns = testNamespace(1)
	f.ns.Model = "test/other"
	f.restart() // opens the other one only
	var both sync.WaitGroup
	both.Go(func() {
		if _, err := f.store.Namespace(context.Background(), &old); err != nil {
			t.Error(err)
		}
	})
	both.Go(func() {
		for n := range uint64(6) {
			noError(t, f.put(100+n, 0))
			f.store.Stats()
		}
	})
	both.Wait()
	f.checkUsed()
}

func TestLeaseKeepsWhatItGrants(t *testing.T) {
	f := newFixture(t, t.TempDir(), 4, 1)
	f.mustPut(0)
	list := append(keys(0), make([]kv.Key, 0, 1000)...)
	for n := range uint64(999) {
		list = append(list, testKey(1000+n))
	}
	l, err := f.store.Lookup(LookupRequest{Namespace: f.space, Keys: list})
	must(t, err)
	defer l.Release()
	if l.Hits() != 1 || cap(l.grants) > 8 {
		t.Errorf("%d hits, room for %d", l.Hits(), cap(l.grants))
	}
}
