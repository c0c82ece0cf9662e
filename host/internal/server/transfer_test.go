package server

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
	"github.com/kvhost/kvhost/staging"
)

func TestWhatIsStoredIsLoaded(t *testing.T) {
	r := newRig(t, nil)
	p := r.dial(nil)
	if l := p.look(4); l.Hits() != 0 || l.Lease() != 0 {
		t.Fatalf("an empty store has %d hits", l.Hits())
	}
	if res := p.save(0, 4); res.Bytes != 4*chunkBytes || res.Cancelled {
		t.Fatalf("store of four chunks: got %+v", res)
	}
	p.check(4)
	again, err := p.store([]client.StoreChunk{chunkOf(0, 0)})
	if err != nil || again.Chunks[0].Result != client.Resident {
		t.Fatalf("store of a resident chunk: got %+v, %v", again, err)
	}

	// In another place, with holes, and told of each layer.
	l := p.look(6)
	if l.Hits() != 4 || !l.Has(3) || l.Has(4) {
		t.Fatalf("%d hits", l.Hits())
	}
	p.poison(9)
	p.poison(10)
	var seen []uint32
	job, err := p.Load(t.Context(), l, []client.LoadChunk{
		{Index: 3, Blocks: blocks(9)}, {Index: 2, Blocks: []uint32{blocks(10)[0], abi.None}},
	}, client.LoadOptions{Layers: func(l uint32, _ []int) { seen = append(seen, l) }})
	testenv.OK(t, err)
	if res := p.loaded(job); len(res.Failed) != 0 {
		t.Fatalf("failed: %v", res.Failed)
	}
	if !p.holds(3, 9) {
		t.Fatal("chunk 3 differs")
	}
	for pl := range planes {
		if got := p.page(pl, blocks(10)[0]); !slices.Equal(got, pattern(2, 0, pl, 0)) {
			t.Fatalf("plane %d of chunk 2 differs", pl)
		}
		if got := p.page(pl, blocks(10)[1]); !slices.Equal(got, make([]byte, pageBytes)) {
			t.Fatalf("plane %d of a block that was not wanted was written", pl)
		}
	}
	if !slices.Equal(seen, []uint32{0, 1}) {
		t.Fatalf("layers: got %v, want 0 and 1", seen)
	}
	testenv.OK(t, p.EndRequest(t.Context(), 0, client.Hints{}))
}

func TestFirstNeededKey(t *testing.T) {
	r := newRig(t, nil)
	p := r.dial(nil)
	p.save(0, 4)
	l, err := p.Lookup(t.Context(), client.LookupRequest{Keys: keys(4), First: 2})
	if err != nil || l.Hits() != 2 || l.Has(1) || !l.Has(2) || !l.Has(3) {
		t.Fatalf("lookup from key 2: got %+v, %v, want the last two", l, err)
	}
	job, err := p.Load(t.Context(), l, []client.LoadChunk{{Index: 3, Blocks: blocks(8)}}, client.LoadOptions{})
	testenv.OK(t, err)
	if res := p.loaded(job); len(res.Failed) != 0 || !p.holds(3, 8) {
		t.Fatalf("failed: %v", res.Failed)
	}
	if l, err = p.Lookup(t.Context(), client.LookupRequest{Keys: keys(4), First: 4}); err != nil || l.Hits() != 0 {
		t.Fatalf("lookup from behind the last key: got %+v, %v, want no hit", l, err)
	}
}

func TestMembership(t *testing.T) {
	r := newRig(t, nil)
	p := r.dial(nil)
	for _, n := range []int{1, 3, 9} {
		job, err := p.Store(t.Context(), 0, 5, []client.StoreChunk{{Key: key(n), Blocks: blocks(0)}})
		testenv.OK(t, err)
		if _, err := job.Published(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	l, err := p.Lookup(t.Context(), client.LookupRequest{Group: 5, Keys: keys(11), First: 2})
	if err != nil || l.Hits() != 2 {
		t.Fatalf("lookup in a membership group: got %+v, %v, want 2 hits", l, err)
	}
	for i := range 11 {
		if want := i == 3 || i == 9; l.Has(i) != want {
			t.Errorf("key %d: %v", i, l.Has(i))
		}
	}
	if _, err := p.Load(t.Context(), l, []client.LoadChunk{{Index: 4, Blocks: blocks(0)}},
		client.LoadOptions{}); err != nil {
		t.Fatal(err)
	}
	if l, err := p.Lookup(t.Context(), client.LookupRequest{Group: 0, Keys: keys(4)}); err != nil || l.Hits() != 0 {
		t.Fatalf("groups share entries: %+v, %v", l, err)
	}
}

func TestTwoRanksMakeAnEntry(t *testing.T) {
	r := newRig(t, nil)
	rank := func(n uint32) func(*client.Hello) {
		return func(h *client.Hello) { h.Rank, h.LocalRanks, h.Namespace.TensorParallel = n, 2, 2 }
	}
	a, b := r.dial(rank(0)), r.dial(rank(1))
	a.save(0, 3)
	if a.look(3).Hits() != 0 || b.look(3).Hits() != 0 {
		t.Fatal("a hit with one piece of two")
	}
	b.save(0, 2)
	if n := a.look(3).Hits(); n != 2 {
		t.Fatalf("%d hits, want the two that are whole", n)
	}
	a.check(2)
	b.check(2) // its own bytes, not rank 0's
}

func TestReplicatedRanksShareAPiece(t *testing.T) {
	r := newRig(t, nil)
	rank := func(n uint32) func(*client.Hello) {
		return func(h *client.Hello) {
			h.Rank, h.LocalRanks, h.Namespace.TensorParallel, h.Namespace.Replicated = n, 2, 2, true
		}
	}
	a, b := r.dial(rank(0)), r.dial(rank(1))
	a.save(0, 2)
	b.rank = 0 // holds what rank 0 stored
	b.check(2)
	if res, err := b.store([]client.StoreChunk{chunkOf(0, 0)}); err != nil || res.Chunks[0].Result != client.Resident {
		t.Fatalf("store of a resident chunk by another engine: got %+v, %v", res, err)
	}
}

func TestSchedulerLeasesForItsWorkers(t *testing.T) {
	r := newRig(t, nil)
	rank := func(n uint32) func(*client.Hello) {
		return func(h *client.Hello) { h.Rank, h.LocalRanks, h.Namespace.TensorParallel = n, 2, 2 }
	}
	a, b := r.dial(rank(0)), r.dial(rank(1))
	a.save(0, 2)
	b.save(0, 2)
	h := r.hello()
	rank(0)(&h)
	h.Role = "scheduler"
	sched, err := client.Dial(t.Context(), h)
	testenv.OK(t, err)
	defer sched.Close()
	l, err := sched.Lookup(t.Context(), client.LookupRequest{Request: 7, Keys: keys(2), Readers: 0b11})
	if err != nil || l.Hits() != 2 {
		t.Fatalf("lookup by the scheduler: got %+v, %v, want 2 hits", l, err)
	}
	for i, w := range []*peer{a, b} {
		if n := r.server.Stats().Leases; n != 1 {
			t.Fatalf("%d leases before load %d", n, i)
		}
		if res := w.loaded(w.loads(w.Leased(0, l.Lease()), 2)); len(res.Failed) != 0 || !w.holds(1, 1) {
			t.Fatalf("rank %d: %v", i, res.Failed)
		}
	}
	until(t, "the last reader uses the lease up", func() bool { return r.server.Stats().Leases == 0 })
	if res := a.loaded(a.loads(a.Leased(0, l.Lease()), 2)); len(res.Failed) != 4 ||
		!errors.Is(res.Failed[0].Err, client.ErrLeaseOver) {
		t.Fatalf("a second load of a rank: %+v", res)
	}
}

func TestLeaseExpires(t *testing.T) {
	r := newRig(t, func(c *Config, _ *store.Config) { c.LeaseTTL = 20 * time.Millisecond })
	p := r.dial(nil)
	p.save(0, 2)
	l := p.look(2)
	until(t, "the lease expires", func() bool { return r.server.Stats().Leases == 0 })
	res := p.loaded(p.loads(l, 2))
	if len(res.Failed) != 4 || res.Bytes != 0 {
		t.Fatalf("load under a used lease: got %+v, want 4 failed blocks", res)
	}
	for i, f := range res.Failed {
		if f.Block != uint32(i) || f.Chunk != i/2 || !errors.Is(f.Err, client.ErrLeaseOver) {
			t.Errorf("failed block: got %+v", f)
		}
	}
	if err := l.Release(t.Context()); err != nil {
		t.Errorf("release after expiry: %v", err)
	}
}

func TestLeaseIsReleasedAndUsedUp(t *testing.T) {
	r := newRig(t, nil)
	p := r.dial(nil)
	p.save(0, 2)
	for name, end := range map[string]func(*client.Lookup){
		"release": func(l *client.Lookup) { l.Release(t.Context()); l.Release(t.Context()) },
		"load":    func(l *client.Lookup) { p.loaded(p.loads(l, 1)) },
		"request": func(l *client.Lookup) { p.EndRequest(t.Context(), 3, client.Hints{}) },
	} {
		l, err := p.Lookup(t.Context(), client.LookupRequest{Request: 3, Keys: keys(2)})
		if err != nil || l.Hits() != 2 {
			t.Fatalf("lookup, %s: got %+v, %v, want 2 hits", name, l, err)
		}
		end(l)
		until(t, name+" ends the lease", func() bool { return r.server.Stats().Leases == 0 })
		if res := p.loaded(p.loads(l, 2)); len(res.Failed) != 4 || !errors.Is(res.Failed[0].Err, client.ErrLeaseOver) {
			t.Fatalf("load under a lease that was %s: got %+v", name, res)
		}
	}
}

// A message that stores more than fits has its last chunks shed, in order: what is on its way is no victim, nor what is leased.
func TestReservationOrder(t *testing.T) {
	r := newRig(t, func(_ *Config, s *store.Config) { s.Roots[0].Capacity = 4*pieceBytes + pieceBytes/2 })
	p := r.dial(nil)
	p.save(0, 4)
	l := p.look(1)
	var list []client.StoreChunk
	for n := 10; n < 15; n++ {
		list = append(list, client.StoreChunk{Key: key(n), Blocks: blocks(n)})
	}
	res, err := p.store(list)
	testenv.OK(t, err)
	var got []client.Result
	for _, c := range res.Chunks {
		got = append(got, c.Result)
	}
	want := []client.Result{client.Stored, client.Stored, client.Stored, client.Shed, client.Shed}
	if !slices.Equal(got, want) {
		t.Errorf("stores: got %v, want %v", got, want)
	}
	if res := p.loaded(p.loads(l, 1)); len(res.Failed) > 0 || !p.holds(0, 0) {
		t.Errorf("the leased chunk: got %+v, want its bytes", res)
	}
}

func TestCancelDoesNotWaitForTheDisk(t *testing.T) {
	r := newRig(t, nil)
	p := r.dial(nil)
	p.save(0, 3)
	job := p.loadsHanging(r, 3)
	testenv.OK(t, job.Cancel(t.Context()))
	if res := p.loaded(job); !res.Cancelled || len(res.Failed) != 6 ||
		!errors.Is(res.Failed[0].Err, client.ErrCancelled) {
		t.Fatalf("cancelled load: got %+v, want 6 failed blocks", res)
	}
	r.faults.Release()
	r.faults.Set()
	p.AwaitCopies(t.Context())
	for i := range 3 {
		if p.holds(i, i) {
			t.Errorf("chunk %d was written after its cancel", i)
		}
	}
	if err := job.Cancel(t.Context()); err != nil {
		t.Errorf("cancel of what is over: %v", err)
	}
	p.check(3)
}

func TestAwaitCopiesWaitsForTheBlocksOnly(t *testing.T) {
	r := newRig(t, nil)
	p := r.dial(nil)
	p.save(0, 1)
	r.faults.Set(faultfs.Rule{Op: staging.OpWrite, Path: "*", Fault: faultfs.Fault{Hang: true}})
	p.fill(1, 1)
	job, err := p.Store(t.Context(), 0, 0, []client.StoreChunk{chunkOf(1, 1)})
	testenv.OK(t, err)
	testenv.OK(t, r.faults.AwaitHanging(testenv.Context(t), 1))
	testenv.OK(t, p.AwaitCopies(t.Context()))
	testenv.OK(t, job.Read(t.Context()))
	p.poison(1) // the blocks are ours again, though the write hangs
	r.faults.Release()
	r.faults.Set()
	if res, err := job.Published(t.Context()); err != nil || res.Chunks[0].Result != client.Stored {
		t.Fatalf("store: got %+v, %v", res, err)
	}
	p.check(2)
}

func TestUnregisterWaitsForItsJobs(t *testing.T) {
	r := newRig(t, nil)
	p := r.dial(nil)
	p.save(0, 2)
	job := p.loadsHanging(r, 2)
	done := make(chan error, 1)
	go func() { done <- p.regs[0].Unregister(t.Context()) }()
	until(t, "UNREGISTER refuses new jobs", func() bool {
		_, err := p.store([]client.StoreChunk{chunkOf(0, 0)})
		return errors.Is(err, client.ErrBusy)
	})
	select {
	case err := <-done:
		t.Fatalf("UNREGISTER did not wait: %v", err)
	default:
	}
	testenv.OK(t, job.Cancel(t.Context()))
	testenv.OK(t, <-done)
	if _, err := p.store([]client.StoreChunk{chunkOf(0, 0)}); !errors.Is(err, client.ErrUnknown) {
		t.Fatalf("a store without registration: %v", err)
	}
	p.loaded(job)
	testenv.OK(t, p.regs[5].Unregister(t.Context()))
	if n := r.server.Stats().ArenaBytes; n != 0 {
		t.Fatalf("%d bytes mapped", n)
	}
}

func TestDamageFailsItsBlocksOnly(t *testing.T) {
	r := newRig(t, nil)
	p := r.dial(nil)
	p.save(0, 3)
	r.faults.Set(faultfs.Rule{Op: staging.OpRead, Path: "*", When: faultfs.When{Nth: 1}, Fault: faultfs.Fault{Errno: 5}})
	res := p.loaded(p.loads(p.look(3), 3))
	if len(res.Failed) != 2 || res.Failed[0].Chunk != res.Failed[1].Chunk {
		t.Fatalf("load of a damaged chunk: got %+v, want its two blocks to fail", res)
	}
	for i := range 3 {
		if i != res.Failed[0].Chunk && !p.holds(i, i) {
			t.Errorf("chunk %d was not delivered", i)
		}
	}
}
