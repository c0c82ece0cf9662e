package peers

import (
	"bytes"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/testkit/storetest"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// newHosts are hosts with room for so many entries each, which lend each other what they have.
func newHosts(t *testing.T, c Config, rooms ...int64) (list []*rig) {
	t.Helper()
	var addresses []string
	for range rooms {
		c.Listen, c.Deadline = "127.0.0.1:0", time.Minute
		p, err := New(c)
		testenv.OK(t, err)
		p.patience = time.Minute
		list, addresses = append(list, &rig{T: t, peers: p}), append(addresses, p.Addr())
	}
	for i, r := range list {
		r.peers.cfg.Hosts = append(append([]string(nil), addresses[:i]...), addresses[i+1:]...)
		r.open(rooms[i])
	}
	for _, r := range list {
		r.await("all peers are here", func() bool {
			here := 0
			for _, x := range r.peers.all() {
				if x.is(Here) {
					here++
				}
			}
			return here == len(rooms)-1
		})
	}
	return list
}

// open starts a host with room for so many entries.
func (r *rig) open(room int64) {
	r.Helper()
	var err error
	r.store, err = store.Open(r.Context(), store.Config{Roots: []store.RootConfig{{Path: r.TempDir(), Capacity: room * pieceBytes, MaxEntries: 1024},
		r.peers.Root(1)}})
	testenv.OK(r, err)
	r.Cleanup(func() { testenv.NoError(r, errors.Join(r.peers.Close(), r.store.Close(), r.peers.CloseFiles())) })
	r.space, err = r.store.Namespace(r.Context(), space())
	testenv.OK(r, err)
	r.peers.Start(r.store)
}

func content(n byte) []byte { return bytes.Repeat([]byte{n, 7, n ^ 0xff, 9}, planes*2*8192/4) }

// put stores chunks, and waits until what leaves for them has been offered.
func (r *rig) put(list ...byte) {
	r.Helper()
	pool, err := staging.NewSlots(1, 1<<20)
	testenv.OK(r, err)
	defer pool.Close()
	for _, n := range list {
		put, err := r.store.Put(r.Context(), store.PutRequest{Namespace: r.space, Key: key(n)})
		testenv.OK(r, err)
		testenv.OK(r, storetest.StorePut(r.Context(), pool, put, content(n)))
		testenv.OK(r, r.store.Settle(r.Context()))
	}
}

// knows waits until a host has heard of so many entries of its peers.
func (r *rig) knows(entries int64) {
	r.Helper()
	r.await(fmt.Sprintf("%d entries of peers", entries), func() bool {
		n := int64(0)
		for _, s := range r.peers.Stats() {
			n += s.Entries
		}
		return n == entries
	})
}

// TestPrefixInParts: a prefix that several peers and this host have in parts is a hit, at one lease of each of them. Of two that have its
// beginning the one that has more is asked for it.
func TestPrefixInParts(t *testing.T) {
	for _, leading := range []bool{true, false} {
		hosts := newHosts(t, Config{}, 64, 64, 64)
		a, b, c := hosts[0], hosts[1], hosts[2]
		a.put(1, 2, 6, 9)
		b.put(1, 2, 3, 4, 7)
		c.put(5)
		c.knows(9)
		q := store.LookupRequest{Namespace: c.space, Keys: []kv.Key{key(1), key(2), key(3), key(4), key(5), key(6), key(7), key(8), key(9)}, Ranks: 1}
		l, err := c.store.Lookup(q)
		testenv.OK(t, err)
		ask := c.peers.Promise(&q, l, leading, nil)
		if ask == nil || !ask.Run(t.Context()) {
			t.Fatal("peers have promised or lent nothing")
		}
		q.After = l
		l, err = c.store.Lookup(q)
		testenv.OK(t, err)
		if l.Hits() != 7 {
			t.Errorf("leading %v: %d hits, want those of all hosts up to the chunk that none has", leading, l.Hits())
		}
		l.Release()
		for _, s := range c.peers.Stats() {
			keys := uint64(5)
			if s.Address == a.peers.Addr() {
				keys = map[bool]uint64{true: 1, false: 2}[leading]
			}
			if s.Asks != 1 || s.Keys != keys || s.Struck != 0 {
				t.Errorf("leading %v: %d asks for %d keys, %d struck out, want 1 for %d", leading, s.Asks, s.Keys, s.Struck, keys)
			}
		}
	}
}

// TestLentToAnother: what another lookup has borrowed since is there for one that asked for it at the same time.
func TestLentToAnother(t *testing.T) {
	f := &fake{lease: lend(pieceBytes)}
	r := newRig(t, f, 1)
	q := store.LookupRequest{Namespace: r.space, Keys: []kv.Key{key(1)}, Ranks: 1}
	none, err := r.store.Lookup(q)
	testenv.OK(t, err)
	defer none.Release()
	for _, ask := range []*Ask{r.peers.Promise(&q, none, true, nil), r.peers.Promise(&q, none, true, nil)} {
		if !ask.Run(t.Context()) {
			t.Error("a lookup is told that there is no more to be found, want it to look again for what was lent twice")
		}
	}
	r.await("the lease without entries is given back", func() bool { return f.given.Load() > 0 })
}

// TestBusyOneOfTwo: a lookup does not ask a peer again that is busy, or has failed, but another that has the same.
func TestBusyOneOfTwo(t *testing.T) {
	hosts := newHosts(t, Config{Bandwidth: 1 << 30}, 64, 64, 64)
	a, b, c := hosts[0], hosts[1], hosts[2]
	a.put(1)
	b.put(1)
	c.knows(2)
	q := store.LookupRequest{Namespace: c.space, Keys: []kv.Key{key(1)}, Ranks: 1}
	l, err := c.store.Lookup(q)
	testenv.OK(t, err)
	ask := c.peers.Promise(&q, l, true, nil)
	busy := a
	if first := ask.peers[0].peer.addr; first == b.peers.Addr() {
		busy = b
	}
	pace := &busy.peers.lending.pace
	pace.mu.Lock()
	pace.free = time.Now().Add(time.Hour)
	pace.mu.Unlock()
	if ask.Run(t.Context()) {
		t.Error("a busy peer has lent something")
	}
	next := c.peers.Promise(&q, l, true, ask)
	if next == nil || next.peers[0].peer == ask.peers[0].peer || !next.Run(t.Context()) {
		t.Fatal("the other peer was not asked, or has lent nothing")
	}
	q.After = l
	l, err = c.store.Lookup(q)
	testenv.OK(t, err)
	if l.Hits() != 1 {
		t.Errorf("%d hits of two peers, one of them busy, want 1", l.Hits())
	}
	l.Release()
}

// TestRoomForAnotherPrompt: a host that has of a peer as many entries as it may, for lookups that are over, gives them back when it asks
// for others, and gets those at once.
func TestRoomForAnotherPrompt(t *testing.T) {
	for _, leading := range []bool{true, false} {
		hosts := newHosts(t, Config{}, 64, 64)
		a, b := hosts[0], hosts[1]
		const chunks = 32
		var keys []kv.Key
		for n := range byte(chunks) {
			a.put(n + 1)
			keys = append(keys, key(n+1))
		}
		b.knows(chunks)
		x := b.peers.all()[0]
		hits := func(keys []kv.Key) int {
			q := store.LookupRequest{Namespace: b.space, Keys: keys, Ranks: 1}
			l, err := b.store.Lookup(q)
			testenv.OK(t, err)
			if ask := b.peers.Promise(&q, l, leading, nil); ask != nil && ask.Run(t.Context()) {
				q.After = l
				l, err = b.store.Lookup(q)
				testenv.OK(t, err)
			}
			defer l.Release()
			return l.Hits()
		}
		most := hits(keys)
		if most == 0 || most == chunks {
			t.Fatalf("leading %v: %d hits of %d, want as many as one host may have", leading, most, chunks)
		}
		for _, from := range []int{most, 0} {
			x.giving.Lock() // no loan is looked at just now
			x.mu.Lock()
			for _, l := range x.loans { // the lookups that have asked are over
				l.since = l.since.Add(-2 * b.peers.cfg.Deadline)
			}
			x.mu.Unlock()
			x.giving.Unlock()
			if n := hits(keys[from:min(from+most, chunks)]); n != min(most, chunks-from) {
				t.Errorf("leading %v: %d hits of another prompt, want the %d that one host may have", leading, n, most)
			}
		}
	}
}
