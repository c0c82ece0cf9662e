package store

import "testing"

// TestLeasesLeaveOthersRoom: a tenant that leases all it finds, again before it gives anything back, leaves another room for what that stores.
func TestLeasesLeaveOthersRoom(t *testing.T) {
	const entries, rounds = 100, 20
	f := newFixture(t, entries, 1)
	put := func(tenant uint32, n uint64) bool {
		q := f.request(n, n, 0)
		q.Tenant = tenant
		return f.putAs(q) == nil
	}
	all := func(from uint64) (list []uint64) {
		for n := range uint64(entries) {
			list = append(list, from+n)
		}
		return list
	}
	lease := func(tenant uint32, ns ...uint64) *Lease {
		l := &Lease{store: f.store}
		for _, n := range ns { // each alone, so that one that is not found does not hide the rest
			one, err := f.store.Lookup(LookupRequest{Namespace: f.space, Keys: keys(n), Tenant: tenant})
			must(t, err)
			l.grants, l.hits = append(l.grants, one.grants...), l.hits+one.hits
		}
		return l
	}
	for _, n := range all(1000) {
		if !put(1, n) {
			t.Fatal("the first tenant does not fill the root")
		}
	}
	held := lease(1, all(1000)...)
	if held.Hits() != entries {
		t.Errorf("a tenant alone has %d hits, want all %d", held.Hits(), entries)
	}
	for round := range uint64(rounds) {
		for n := range uint64(entries / rounds) {
			put(2, 2000+round*entries/rounds+n)
		}
		again := lease(1, all(1000)...)
		held.Release()
		held = again
	}
	for _, n := range all(2000) {
		put(2, n)
	}
	hits := 0
	for _, n := range all(2000) { // one after the other
		one := lease(2, n)
		hits += one.Hits()
		one.Release()
	}
	if hits < entries*2/5 || held.Hits() < entries/4 {
		t.Errorf("the other tenant has %d hits beside one with %d under leases, want at least %d", hits, held.Hits(), entries*2/5)
	}
	held.Release()

	theirs := lease(2, all(1000)...)
	own := lease(1, all(1000)...)
	if n := theirs.Hits(); n == 0 || n > entries/3+1 || own.Hits() <= n {
		t.Errorf("one has leases of %d entries of another, which has those of %d, want a third at most and more", n, own.Hits())
	}
	theirs.Release()
	own.Release()
	f.must(f.check())
}
