package server

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/budget"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/kv"
)

// A tenant that leases all that it can keeps no other tenant from storing. Its older leases end early, and their loads say so;
// the leases of a tenant that holds little stay, however many they are.
func TestLeasesLeaveRoom(t *testing.T) {
	const chunks, fresh = 16, 4
	r := newRig(t, func(c *Config, s *store.Config) {
		s.Roots[0].Capacity = chunks*pieceBytes + pieceBytes/2
		c.Capacity, c.Limits.Sessions = s.Roots[0].Capacity, 8
	})
	greedy := r.dial(func(h *client.Hello) { h.Engine, h.Tenant = "greedy", 1 })
	greedy.save(0, chunks)
	other := r.dial(func(h *client.Hello) { h.Engine, h.Tenant = "other", 2 })
	kept := other.look(1)
	for range 3 * chunks { // of one entry, again and again: that is not greed
		other.look(1)
	}
	lookOne := func(p *peer, n int) *client.Lookup {
		l, err := p.Lookup(t.Context(), client.LookupRequest{Keys: keys(n + 1)[n:]})
		if err != nil || l.Hits() != 1 {
			t.Fatalf("chunk %d: %d hits, %v, want a hit", n, l.Hits(), err)
		}
		return l
	}
	var leases []*client.Lookup
	for n := range chunks {
		leases = append(leases, lookOne(greedy, n))
	}
	load := func(l *client.Lookup) error {
		if res := greedy.loaded(greedy.loads(l, 1)); len(res.Failed) > 0 {
			return res.Failed[0].Err
		}
		return nil
	}
	for n := chunks; n < chunks+fresh; n++ {
		other.fill(n, n)
	}
	for n := range fresh {
		res, err := other.store([]client.StoreChunk{chunkOf(chunks+n, chunks+n)})
		if err != nil || res.Chunks[0].Result != client.Stored {
			t.Errorf("another tenant's store: %+v, %v, want it stored", res, err)
		}
	}
	if err := load(leases[0]); !errors.Is(err, client.ErrLeaseOver) || !strings.Contains(err.Error(), "ended early") {
		t.Errorf("load under the oldest lease: %v, want that it ended early", err)
	}
	if err := load(leases[chunks-1]); err != nil {
		t.Errorf("load under the youngest lease: %v, want none", err)
	}
	if res := other.loaded(other.loads(kept, 1)); len(res.Failed) > 0 || !other.holds(0, 0) {
		t.Errorf("another tenant's load: %+v, want the chunk", res)
	}
	if f := figuresOf(r.server, "leased bytes"); f.Refused == 0 || len(f.Most) == 0 || f.Held == 0 {
		t.Errorf("figures of leased bytes: %+v, want the holders and what ended", f)
	}
	greedy.Close()
	other.Close()
	until(t, "all is given back", func() bool { return figuresOf(r.server, "leased bytes").Held == 0 })
}

// A tenant that leases all of a root, and all again before it gives anything back, leaves another's chunks two fifths of the root.
func TestTenantBesideLeases(t *testing.T) {
	const chunks, every = 80, 8
	r := newRig(t, func(c *Config, s *store.Config) {
		s.Roots[0].Capacity = chunks*pieceBytes + pieceBytes/2
		c.Capacity, c.Limits.Sessions = s.Roots[0].Capacity, 8
	})
	greedy := r.dial(func(h *client.Hello) { h.Engine, h.Tenant = "greedy", 1 })
	store := func(p *peer, n int) bool {
		p.fill(n, 0)
		res, err := p.store([]client.StoreChunk{chunkOf(n, 0)})
		testenv.OK(t, err)
		return res.Chunks[0].Result == client.Stored
	}
	for n := range chunks {
		if !store(greedy, n) {
			t.Fatalf("chunk %d is not stored in an empty root", n)
		}
	}
	other := r.dial(func(h *client.Hello) { h.Engine, h.Tenant = "other", 2 })
	one := func(p *peer, n int) (*client.Lookup, int) {
		l, err := p.Lookup(t.Context(), client.LookupRequest{Keys: keys(n + 1)[n:]})
		testenv.OK(t, err)
		return l, l.Hits()
	}
	all := func() (held []*client.Lookup) {
		for n := range chunks {
			if l, hits := one(greedy, n); hits > 0 {
				held = append(held, l)
			}
		}
		return held
	}
	held, stored := all(), 0
	for n := chunks; n < 3*chunks; n++ {
		if store(other, n) {
			stored++
		}
		if n%every == 0 {
			again := all()
			for _, l := range held {
				testenv.OK(t, l.Release(t.Context()))
			}
			held = again
		}
	}
	hits := 0
	for n := chunks; n < 3*chunks; n++ {
		l, found := one(other, n)
		hits += found
		testenv.OK(t, l.Release(t.Context()))
	}
	if hits < chunks*2/5 || stored < chunks {
		t.Errorf("the other tenant has stored %d of %d and has %d hits beside one with %d leases, want %d and %d", stored, 2*chunks, hits, len(held), chunks, chunks*2/5)
	}
}

// An engine that is alone and pins all that it has stored keeps half of the root for what it stores next. Pins are no hits.
func TestPinsLeaveRoom(t *testing.T) {
	const chunks = 16
	r := newRig(t, func(c *Config, s *store.Config) {
		s.Roots[0].Capacity = chunks*pieceBytes + pieceBytes/2
		c.Capacity = s.Roots[0].Capacity
	})
	p := r.dial(nil)
	p.save(0, chunks)
	pin := func() int {
		l, err := p.Lookup(t.Context(), client.LookupRequest{Keys: keys(chunks), Pin: true})
		testenv.OK(t, err)
		return l.Hits()
	}
	kept := pin()
	if most := int(p.Host().PinBytes/pieceBytes) + 1; kept != most {
		t.Errorf("%d of %d chunks are pinned, want %d", kept, chunks, most)
	}
	if again := pin(); again != kept {
		t.Errorf("%d chunks are pinned again, want the %d that are", again, kept)
	}
	if f := r.store.Stats(); f.Lookups != 0 || f.Hits != 0 {
		t.Errorf("%d lookups and %d hits are counted of pins, want none", f.Lookups, f.Hits)
	}
	p.save(chunks, 2*chunks-kept)
	if l := p.look(chunks); l.Hits() != kept {
		t.Errorf("%d hits after as many stores as there is room for, want the %d that were pinned", l.Hits(), kept)
	}
}

// What was pinned is evicted, once its pin is over, as if it had not been.
func TestPinsAreNoUse(t *testing.T) {
	const chunks = 16
	r := newRig(t, func(_ *Config, s *store.Config) { s.Roots[0].Capacity = chunks*pieceBytes + pieceBytes/2 })
	p := r.dial(nil)
	p.save(0, chunks)
	l, err := p.Lookup(t.Context(), client.LookupRequest{Keys: keys(2), Pin: true})
	testenv.OK(t, err)
	testenv.OK(t, l.Release(t.Context()))
	p.save(chunks, chunks+1)
	if hits := p.look(1).Hits(); hits != 0 {
		t.Errorf("%d hits of the chunk that was stored first, want that it is evicted", hits)
	}
}

func figuresOf(s *Server, of string) (f budget.Figures) {
	for _, f := range s.Budgets(1) {
		if f.Of == of {
			return f
		}
	}
	return f
}

// A LOOKUP says how many bytes its hits are, and once something was loaded how long that takes.
func TestLookupSaysWhatALoadCosts(t *testing.T) {
	r := newRig(t, nil)
	p := r.dial(nil)
	p.save(0, 4)
	first := p.look(4)
	if first.Bytes != 4*chunkBytes || first.LoadTime != 0 {
		t.Errorf("%d bytes, %v before anything was loaded", first.Bytes, first.LoadTime)
	}
	if res := p.loaded(p.loads(first, 4)); len(res.Failed) > 0 {
		t.Fatal(res.Failed)
	}
	again := p.look(4)
	if again.Bytes != 4*chunkBytes || again.LoadTime <= 0 || again.LoadTime > time.Minute {
		t.Errorf("%d bytes, %v", again.Bytes, again.LoadTime)
	}
	miss, err := p.Lookup(t.Context(), client.LookupRequest{Keys: []kv.Key{key(99)}})
	if err != nil || miss.Bytes != 0 || miss.LoadTime != 0 {
		t.Errorf("lookup that misses: got %+v, %v", miss, err)
	}
}
