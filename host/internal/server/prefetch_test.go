package server

import (
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/memfs"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/store/moves"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
)

// farChunks are in the directory only, of what levels has stored.
const farChunks = 4

// pieceBytes is what a chunk takes in a root.
const pieceBytes = chunkBytes + 2*4096

// levels is a host with a root in memory before one in a directory, and a session that has stored one prefix, of which the
// first chunks have left memory. One move runs at a time.
func levels(t *testing.T) (*rig, *peer) {
	t.Helper()
	const room, stored = 16, 32
	memory, err := memfs.New(64<<20, nil)
	testenv.OK(t, err)
	r := newRig(t, func(_ *Config, c *store.Config) {
		c.Roots[0].Level = 1
		near := store.RootConfig{Path: "memory:", Medium: store.Medium{FS: memory, Traits: store.Memory}, Capacity: room * pieceBytes, MaxEntries: 1024}
		c.Roots = append([]store.RootConfig{near}, c.Roots...)
		c.Moves = store.Moves{Workers: 1}
	})
	t.Cleanup(func() { memory.Close() })
	p := r.dial(nil)
	for n := range stored {
		p.fill(n, 0)
		if res, err := p.store([]client.StoreChunk{chunkOf(n, 0)}); err != nil || res.Chunks[0].Result != client.Stored {
			t.Fatal(res, err)
		}
		r.settle()
	}
	return r, p
}

// settle waits until no move is under way.
func (r *rig) settle() {
	r.t.Helper()
	testenv.OK(r.t, r.store.Settle(r.t.Context()))
}

// prefetch looks up the first chunks, wants them in the directory, and asks for them.
func (p *peer) prefetch(n int) *client.Lookup {
	p.t.Helper()
	l, err := p.Lookup(p.t.Context(), client.LookupRequest{Keys: keys(n), Prefetch: true})
	testenv.OK(p.t, err)
	if at := l.Levels(); l.Hits() != n || len(at) != 1 || at[0].Level != 1 || at[0].Chunks != n ||
		at[0].Bytes != int64(n)*chunkBytes || at[0].LoadTime != l.LoadTime {
		p.t.Fatalf("%d hits of %d in %+v", l.Hits(), n, at)
	}
	return l
}

// loadAll loads what was found to poisoned blocks, and compares every byte.
func (p *peer) loadAll(l *client.Lookup) {
	p.t.Helper()
	if res := p.loaded(p.loads(l, l.Hits())); len(res.Failed) > 0 || res.Bytes != int64(l.Hits())*chunkBytes {
		p.t.Fatalf("%d bytes, failed: %v", res.Bytes, res.Failed)
	}
	for i := range l.Hits() {
		if !p.holds(i, i) {
			p.t.Fatalf("chunk %d differs", i)
		}
	}
}

// prefetches compares what became of prefetches to memory.
func (r *rig) prefetches(want ...uint64) {
	r.t.Helper()
	l := r.store.Stats().Levels[0]
	m := l.Moves[moves.Prefetch]
	for i, got := range []uint64{m.Done, m.Cancelled, m.Shed, m.Failed, l.PrefetchesUsed} {
		if got != want[i] {
			r.t.Errorf("%d prefetches %s, want %d", got, []string{"done", "cancelled", "shed", "failed", "used"}[i], want[i])
		}
	}
}

// loadedFrom is the bytes that were opened for loads in each level.
func (r *rig) loadedFrom() (near, far uint64) {
	st := r.store.Stats().Levels
	return st[0].Loaded, st[1].Loaded
}

// TestPrefetch: what a LOOKUP finds in the directory and asks for is loaded from memory once it is there. A later LOOKUP says
// so, and how long loads from each level take.
func TestPrefetch(t *testing.T) {
	r, p := levels(t)
	if got := p.Host().Levels; got != 2 {
		t.Errorf("HELLO says %d levels", got)
	}
	l := p.prefetch(farChunks)
	r.settle()
	r.prefetches(farChunks, 0, 0, 0, 0)
	p.loadAll(l)
	r.prefetches(farChunks, 0, 0, 0, farChunks)
	if near, far := r.loadedFrom(); near != farChunks*pieceBytes || far != 0 {
		t.Errorf("%d bytes were loaded from memory, %d from the directory", near, far)
	}
	mixed := p.look(farChunks + 2)
	at := mixed.Levels()
	if len(at) != 2 || at[0].Level != 0 || at[0].Chunks != farChunks || at[1].Level != 1 || at[1].Chunks != 2 ||
		at[0].Bytes+at[1].Bytes != mixed.Bytes || at[0].LoadTime <= 0 || at[1].LoadTime != 0 || mixed.LoadTime != 0 {
		t.Errorf("hits in %+v, %v for all", at, mixed.LoadTime)
	}
	p.loadAll(mixed)
	r.settle()
	mixed = p.look(farChunks + 4) // those of before have come nearer; the directory is measured now
	if at = mixed.Levels(); len(at) != 2 || at[1].LoadTime <= 0 || at[0].LoadTime > mixed.LoadTime || at[1].LoadTime > mixed.LoadTime {
		t.Errorf("hits in %+v, %v for all", at, mixed.LoadTime)
	}
}

// TestPrefetchEnds: copies end with RELEASE, and with the session.
func TestPrefetchEnds(t *testing.T) {
	for name, end := range map[string]func(p *peer, l *client.Lookup) error{
		"release": func(p *peer, l *client.Lookup) error { return l.Release(t.Context()) },
		"session": func(p *peer, l *client.Lookup) error { return p.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			r, p := levels(t)
			r.faults.Set(faultfs.MustRules("read ** 1st: hang")...)
			l := p.prefetch(farChunks)
			testenv.OK(t, r.faults.AwaitHanging(testenv.Context(t), 1))
			testenv.OK(t, end(p, l))
			until(t, "the lease ends", func() bool { return r.server.Stats().Leases == 0 })
			r.faults.Release()
			r.settle()
			r.prefetches(0, farChunks, 0, 0, 0)
		})
	}
}
