package server

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
)

// storeHeld sends a STORE of chunks from to to that waits for a semaphore which nobody raises.
func (p *peer) storeHeld(w *client.Semaphores, done, from, to int) *client.StoreJob {
	p.t.Helper()
	var list []client.StoreChunk
	for n := from; n < to; n++ {
		list = append(list, client.StoreChunk{Key: key(n), Blocks: blocks(n % 8)})
	}
	job, err := p.Store(p.t.Context(), 0, 0, list, client.WithTimeline(&client.Timeline{
		Semaphores: w, Wait: 0, WaitValue: 1, Done: done, DoneValue: 1, Status: -1,
	}))
	testenv.OK(p.t, err)
	return job
}

// Stores that wait for a semaphore reserve a share of the room, not all of it: others store meanwhile.
func TestStoresThatWaitReserveAShare(t *testing.T) {
	const capacity = 4 << 20 // some hundred chunks
	r := newRig(t, func(c *Config, s *store.Config) {
		s.Roots[0].Capacity, c.Capacity, c.Limits.Sessions = capacity, capacity, 4
	})
	greedy, other := r.dial(nil), r.dial(func(h *client.Hello) { h.Engine = "other" })
	w := greedy.share()
	defer greedy.Close() // before its semaphores
	var jobs []*client.StoreJob
	for n := range 8 {
		jobs = append(jobs, greedy.storeHeld(w, n+1, 40*n, 40*n+40))
	}
	if err := greedy.Ping(t.Context()); err != nil { // all have come
		t.Fatal(err)
	}
	<-r.sessionOf(t, "e").reserving.Idle()
	if held := r.server.budgets.Room.Figures(0); held.Held == 0 || held.Held > capacity/4 || held.Refused == 0 {
		t.Errorf("room of waiting stores: got %+v, want at most a quarter of the capacity, and refusals", held)
	}
	for n := range 16 { // not the keys of the others
		other.fill(n, n)
		if res, err := other.store([]client.StoreChunk{{Key: key(1000 + n), Blocks: blocks(n)}}); err != nil || res.Chunks[0].Result != client.Stored {
			t.Fatalf("chunk %d: %+v, %v", n, res, err)
		}
	}
	w.Store(0, 1)
	refused := 0
	for _, job := range jobs {
		res, err := job.Published(t.Context())
		testenv.OK(t, err)
		for _, c := range res.Chunks {
			if errors.Is(c.Err, client.ErrLimit) {
				refused++
			}
		}
	}
	if refused == 0 || refused == 320 {
		t.Errorf("%d of 320 chunks were refused", refused)
	}
	if held := r.server.budgets.Room.Figures(0).Held; held != 0 {
		t.Errorf("%d bytes are held when no job waits", held)
	}
}

// A job waits for its semaphore for a limited time. Then it fails by name, and what it reserved or pinned is free.
func TestJobsDoNotWaitForEver(t *testing.T) {
	r := newRig(t, func(c *Config, _ *store.Config) { c.MaxWait = 10 * time.Millisecond })
	p := r.dial(nil)
	p.save(0, 1)
	used := r.store.Stats().Roots[0].Used
	w := p.share()
	l := p.look(1)
	load := p.loadInOrder(l, 1, &client.Timeline{Semaphores: w, Wait: 0, WaitValue: 1, Done: 9, DoneValue: 1, Status: -1})
	res, err := p.storeHeld(w, 2, 1, 3).Published(t.Context())
	if err != nil || res.Cancelled || res.Chunks[0].Result != client.Failed || !errors.Is(res.Chunks[1].Err, client.ErrLimit) {
		t.Fatalf("store that waited too long: got %+v, %v", res, err)
	}
	if got := p.loaded(load); got.Cancelled || len(got.Failed) != 2 || !errors.Is(got.Failed[0].Err, client.ErrLimit) {
		t.Fatalf("load that waited too long: got %+v", got)
	}
	until(t, "the room is free", func() bool {
		return r.store.Stats().Roots[0].Used == used && r.server.budgets.Room.Figures(0).Held == 0
	})
	until(t, "the lease is over", func() bool { return r.server.Stats().Leases == 0 })
	until(t, "the done semaphores are written", func() bool { return w.Load(2) == 1 && w.Load(9) == 1 })
}

func (r *rig) sessionOf(t *testing.T, engine string) *session {
	t.Helper()
	x := engineOf(r.server, engine)
	if x == nil {
		t.Fatalf("no session of %s", engine)
	}
	return x
}

// A root that holds a few chunks only holds one of each of two tenants' stores that wait, and not all of one's.
func TestSmallRootsHoldAWaitingChunk(t *testing.T) {
	const capacity = 8 * (chunkBytes + pageBytes)
	r := newRig(t, func(c *Config, s *store.Config) { s.Roots[0].Capacity, c.Capacity = capacity, capacity })
	for tenant := range uint32(2) {
		p := r.dial(func(h *client.Hello) { h.Engine, h.Tenant = string(rune('a'+tenant)), tenant })
		w := p.share()
		job := p.storeHeld(w, 1, 10*int(tenant), 10*int(tenant)+8)
		if err := p.Ping(t.Context()); err != nil { // it has come
			t.Fatal(err)
		}
		<-r.sessionOf(t, string(rune('a'+tenant))).reserving.Idle()
		if held := r.server.budgets.Room.Figures(0).Held; held < int64(tenant+1)*chunkBytes || held > capacity/2 {
			t.Errorf("%d bytes are held for %d tenants", held, tenant+1)
		}
		defer p.Close() // before its semaphores
		defer func() {
			w.Store(0, 1)
			res, err := job.Published(t.Context())
			if err != nil || res.Chunks[0].Result != client.Stored || !errors.Is(res.Chunks[7].Err, client.ErrLimit) {
				t.Errorf("tenant %d: %+v, %v", tenant, res, err)
			}
		}()
	}
}

// A chunk that cannot be read fails its layers and its blocks, and no other; a session that ends leaves no load.
func TestLayersOfAChunkThatFails(t *testing.T) {
	r := newRig(t, nil)
	p := r.dial(nil)
	p.save(0, 3)
	l := p.look(3)
	r.faults.Set(faultfs.MustRules("read * 1st: eio")...)
	var list []client.LoadChunk
	for i := range 3 {
		p.poison(i)
		list = append(list, client.LoadChunk{Index: i, Blocks: blocks(i)})
	}
	var told [][]int
	job, err := p.Load(t.Context(), l, list, client.LoadOptions{Layers: func(_ uint32, failed []int) { told = append(told, failed) }})
	testenv.OK(t, err)
	res := p.loaded(job)
	if len(res.Failed) != chunkBlocks || len(told) != layers {
		t.Fatalf("%+v, layers %v", res, told)
	}
	bad := res.Failed[0].Chunk
	for _, f := range told {
		if !slices.Equal(f, []int{bad}) {
			t.Errorf("layers failed for %v, the load for chunk %d", told, bad)
		}
	}
	for i := range 3 {
		if i != bad && !p.holds(i, i) {
			t.Errorf("chunk %d differs", i)
		}
	}
	other := r.dial(nil)
	l = other.look(bad + 3)
	if l.Hits() == 0 {
		return // the first of the chain failed
	}
	if _, err := other.Load(t.Context(), l, list[:l.Hits()],
		client.LoadOptions{Layers: func(uint32, []int) {}}); err != nil {
		t.Fatal(err)
	}
	other.Close()
	until(t, "the session's load is over", func() bool {
		return r.server.Stats().Sessions == 1 &&
			r.server.Stats().Jobs == 0
	})
}
