package store

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/internal/testkit/s3double"
	"github.com/kvhost/kvhost/host/kv"
)

// listed is how many entries were entered by their names, and no head of them was read yet.
func (f *fixture) listed() (n int) {
	for _, r := range f.store.roots {
		r.Lock()
		r.Index.Each(func(_ uint32, e *index.Entry) {
			if e.Is(index.Listed) {
				n++
			}
		})
		r.Unlock()
	}
	return n
}

// isListed says whether an entry was entered by its name, and no head of it was read yet.
func (f *fixture) isListed(n uint64) bool {
	m, r := f.markOf(n), f.root()
	r.Lock()
	defer r.Unlock()
	return r.Index.At(m.Slot).Is(index.Listed)
}

// stallHeads lets no head be read but the first, which tells the ranks of all.
func stallHeads(s *s3double.Server, p *s3double.Proxy, rules ...s3double.Rule) {
	for _, key := range slices.Sorted(slices.Values(pieces(s)))[1:] {
		rules = append(rules, s3double.Rule{Fault: s3double.Stall, Method: "GET", In: key})
	}
	p.Set(rules...)
}

// TestStartByAListing: after a kill the names and sizes that the server lists are all that lookups, stores and evictions need. What
// heads say follows when they can be read. What lacks a piece, or is none, is judged by its head.
func TestStartByAListing(t *testing.T) {
	t.Parallel() // it waits more than it works
	s := startServer(t)
	p := s3double.StartProxy(t, s.URL)
	f := newFixtureIn(t, "", 8, 2, func(c *Config) { c.Now = fakeClock() }, inBucket(t, p.URL))
	for n := range uint64(8) {
		for rank := range uint32(2) {
			q := f.request(n, max(n, 1)-1, rank)
			q.Tenant = 5 + uint32(n%2)
			must(t, f.putAs(q))
		}
	}
	key := func(n uint64, rank uint32) string {
		return "kv/" + strings.TrimPrefix(f.pieceFile(n, rank), bucketRoot+"/")
	}
	f.kill()
	s.Set(key(7, 1), nil)
	s.Set("kv/other/.kvhost/lock", []byte("x"))
	s.Set("kv/other/piece", []byte("of another root"))
	lists := s.Count("LIST")
	var rules []s3double.Rule
	first := slices.Min(pieces(s)) // tells the ranks of all
	for n := range uint64(7) {
		if at := key(n, 0); at != first {
			rules = append(rules, s3double.Rule{Fault: s3double.Stall, Method: "GET", In: at})
		}
	}
	p.Set(rules...)
	inBucket(t, p.URL)(&f.cfg)
	f.start()
	if n := s.Count("LIST") - lists; n > 12 {
		t.Errorf("%d lists for a start, want at most 12, one of them of objects", n)
	}
	here := func() (list []uint64) {
		for n := range uint64(8) {
			if f.has(n) {
				list = append(list, n)
			}
		}
		return list
	}
	equal(t, "hits by the listing alone", len(here()), 7)
	r := f.root()
	equal(t, "scanning", r.IsScanning(), false)
	f.mustPutRanks(5, 20, 0b11)
	f.mustPutRanks(5, 21, 0b11)
	equal(t, "the oldest entry is a hit after stores that needed its room", f.has(0), false)
	if st := f.store.Stats().Roots[0]; st.Used > st.Capacity {
		t.Errorf("%d bytes are used of %d", st.Used, st.Capacity)
	}
	p.Set()
	await(t, "all heads are read", func() bool { return f.listed() == 0 })
	for _, n := range here()[1:] {
		m := f.markOf(n)
		k := testKey(n - 1)
		r.Lock()
		e, want := r.Index.At(m.Slot), kv.Fingerprint(f.space.Digest, 0, k)
		if got := e.Parent(); got != want || r.TenantOf(m.Slot) != 5+uint32(n%2) {
			t.Errorf("entry %d: parent %x of tenant %d, want %x of %d", n, got, r.TenantOf(m.Slot), want, 5+n%2)
		}
		r.Unlock()
	}
	f.mustRead(here()...)
	r.Lock()
	defer r.Unlock()
	used := int64(0)
	r.Index.Each(func(slot uint32, _ *index.Entry) { used += r.Index.Bytes(slot) })
	equal(t, "bytes in the account", r.Account.Figures().Used, used)
	must(t, r.Index.Check())
}

// TestListedOfLaterRanks: of an engine on two hosts the second has no piece of rank 0.
func TestListedOfLaterRanks(t *testing.T) {
	s := startServer(t)
	f := newFixtureIn(t, "", 8, 4, func(c *Config) { c.Now = fakeClock() }, inBucket(t, s.URL))
	for n := range uint64(4) {
		for rank := uint32(2); rank < 4; rank++ {
			q := f.request(n, n, rank)
			q.Ranks = 0b1100
			must(t, f.putAs(q))
		}
	}
	f.kill()
	f.life(s.URL)
	await(t, "all heads are read", func() bool { return f.listed() == 0 })
	equal(t, "objects", len(pieces(s)), 8)
	for n := range uint64(4) {
		l, err := f.store.Lookup(LookupRequest{Namespace: f.space, Keys: keys(n), Ranks: 0b1100})
		must(t, err)
		if l.Hits() != 1 {
			t.Errorf("key %d is a miss", n)
		}
		l.Release()
	}
	must(t, f.check())
}

// TestListedHasNoTenantYet: what is known by its name alone counts for nobody's quota, and nobody can discard it.
func TestListedHasNoTenantYet(t *testing.T) {
	t.Parallel() // it waits more than it works
	s := startServer(t)
	p := s3double.StartProxy(t, s.URL)
	f := newFixtureIn(t, "", 20, 1, func(c *Config) { c.Quotas = []Quota{{Bytes: 3 * pieceBytes}} }, inBucket(t, p.URL))
	for n := range uint64(5) {
		q := f.request(n, n, 0)
		q.Tenant = 7
		must(t, f.putAs(q))
	}
	f.kill()
	stallHeads(s, p)
	f.life(p.URL)
	must(t, f.putAs(f.request(5, 5, 0)))
	for n := range uint64(5) {
		if !f.has(n) {
			t.Errorf("key %d of tenant 7 is a miss after tenant 0 has stored within its quota", n)
		}
	}
	discard := func(n uint64, tenant uint32, want DiscardResult) {
		t.Helper()
		got, err := f.store.Discard(DiscardRequest{Namespace: f.space, Keys: keys(n), Tenant: tenant})
		must(t, err)
		equal(t, fmt.Sprintf("key %d discarded by tenant %d", n, tenant), got[0], want)
	}
	listed := slices.IndexFunc(upTo(5), func(n uint64) bool { return f.isListed(n) })
	discard(uint64(listed), 0, DiscardUnavailable)
	discard(uint64(listed), 7, DiscardUnavailable)
	p.Set()
	await(t, "all heads are read", func() bool { return f.listed() == 0 })
	discard(uint64(listed), 0, DiscardOtherTenant)
	discard(uint64(listed), 7, DiscardRemoved)
	must(t, f.check())
}

// TestHeadsMakeNothingNewer: a policy gets what heads say, and old entries stay older for it than what was stored since the start.
func TestHeadsMakeNothingNewer(t *testing.T) {
	t.Parallel() // it waits more than it works
	s := startServer(t)
	p := s3double.StartProxy(t, s.URL)
	w := &witness{}
	f := newFixtureIn(t, "", 4, 1, inBucket(t, p.URL))
	for n := range uint64(3) {
		q := f.request(n, max(n, 1)-1, 0)
		q.Tenant = 7
		must(t, f.putAs(q))
	}
	f.kill()
	stallHeads(s, p)
	f.cfg.Policies.Evict = handle(w.module())
	f.life(p.URL)
	f.mustPut(3)
	w.told(f)
	p.Set()
	await(t, "all heads are read", func() bool { return f.listed() == 0 })
	if told := w.told(f); !strings.Contains(told, "link:2<1") {
		t.Errorf("the policy was told %q, want the parent of 2", told)
	}
	f.mustPut(4)
	equal(t, "what was stored after the start is a hit", f.has(3), true)
}

// TestListingIsBegunAgain: a listing that fails is begun again, and no head is read of what the first has met.
func TestListingIsBegunAgain(t *testing.T) {
	t.Parallel() // it waits more than it works
	s := startServer(t)
	p := s3double.StartProxy(t, s.URL)
	const n = 1100 // more than an answer tells of
	f := newFixtureIn(t, "", n, 1, inBucket(t, p.URL))
	f.mustPut(0)
	body := s.Objects()[pieces(s)[0]].Body
	h, err := pieceformat.DecodeHeader(body)
	must(t, err)
	for k := uint64(1); k < n; k++ {
		body, h.Key = bytes.Clone(body), testKey(k)
		h.Encode(body)
		s.Set("kv/"+strings.TrimPrefix(f.pieceFile(k, 0), bucketRoot+"/"), body)
	}
	f.kill()
	stallHeads(s, p, s3double.Rule{Fault: s3double.Denied, In: "continuation-token", Times: 1})
	f.cfg.ScanWait = -1
	f.life(p.URL)
	equal(t, "entries", f.store.Stats().Roots[0].Entries, n)
	if read := n - f.listed(); read > 1 {
		t.Errorf("%d heads were read, want that of the first", read)
	}
	p.Set()
}
