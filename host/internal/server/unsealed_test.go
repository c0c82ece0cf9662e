package server

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/client"
)

// sharedMemory makes POSIX shared memory that nothing seals.
func sharedMemory(t *testing.T, bytes int64) *os.File {
	t.Helper()
	testenv.Need(t, testenv.SharedMemory)
	dir, err := os.MkdirTemp("/dev/shm", "kvhost")
	testenv.OK(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	f, err := os.Create(filepath.Join(dir, "pages"))
	testenv.OK(t, err)
	testenv.OK(t, f.Truncate(bytes))
	return f
}

// Memory that can shrink is refused unless HELLO allows it. Then a shrink fails the jobs that touch the lost pages, in their
// order by semaphores too, and neither their entries nor another session.
func TestUnsealedMemory(t *testing.T) {
	r := newRig(t, nil)
	other := r.dial(nil)
	other.save(0, 2)
	const bytes = planes * arenaBlocks * pageBytes
	open := func(allowed bool) (*client.Session, *os.File, *client.Arena) {
		h := r.hello()
		h.UnsealedMemory = allowed
		s, err := client.Dial(t.Context(), h)
		testenv.OK(t, err)
		t.Cleanup(func() { s.Close() })
		f := sharedMemory(t, bytes)
		a, err := client.OpenArena(f)
		testenv.OK(t, err)
		t.Cleanup(func() { a.Close() })
		return s, f, a
	}
	s, _, a := open(false)
	if _, err := s.Register(t.Context(), 0, a, groupRegions(0)); !errors.Is(err, client.ErrArena) {
		t.Fatalf("HELLO does not allow it: %v", err)
	}

	s, f, a := open(true)
	if _, err := s.Register(t.Context(), 0, a, groupRegions(0)); err != nil {
		t.Fatal(err)
	}
	p := &peer{Session: s, t: t, arena: a}
	p.save(2, 3)
	if res := p.loaded(p.loads(p.look(3), 3)); len(res.Failed) > 0 {
		t.Fatal(res.Failed)
	}
	counters, err := client.NewArena(4096)
	testenv.OK(t, err)
	defer counters.Close()
	w, err := s.ShareSemaphores(t.Context(), counters, 0, 8)
	testenv.OK(t, err)
	held, err := s.Store(t.Context(), 0, 0, []client.StoreChunk{chunkOf(7, 7)},
		client.WithTimeline(&client.Timeline{Semaphores: w, WaitValue: 1, Done: 1, DoneValue: 1, Status: 2}))
	testenv.OK(t, err)
	testenv.OK(t, f.Truncate(0))
	w.Store(0, 1)
	if res, err := held.Published(t.Context()); err != nil || res.Chunks[0].Result != client.Failed ||
		!errors.Is(res.Chunks[0].Err, client.ErrInvalid) || w.Load(2) != client.StatusFailed {
		t.Errorf("a store of pages that are gone: %+v, %v, status %d", res, err, w.Load(2))
	}
	l, err := s.Lookup(t.Context(), client.LookupRequest{Keys: keys(3)})
	if err != nil || l.Hits() != 3 {
		t.Fatal(l, err)
	}
	load, err := s.Load(t.Context(), l, []client.LoadChunk{{Index: 1, Blocks: blocks(1)}}, client.LoadOptions{})
	testenv.OK(t, err)
	if res := p.loaded(load); len(res.Failed) != chunkBlocks || !errors.Is(res.Failed[0].Err, client.ErrInvalid) {
		t.Errorf("a load to pages that are gone: %+v", res)
	}
	other.check(3)
	testenv.NoError(t, s.Ping(t.Context()))
}

// Semaphores in memory that is gone cancel the jobs that wait for them.
func TestSemaphoresInMemoryThatIsGone(t *testing.T) {
	r := newRig(t, nil)
	p := r.dial(func(h *client.Hello) { h.UnsealedMemory = true })
	f := sharedMemory(t, 4096)
	a, err := client.OpenArena(f)
	testenv.OK(t, err)
	defer a.Close()
	w, err := p.ShareSemaphores(t.Context(), a, 0, 8)
	testenv.OK(t, err)
	order := &client.Timeline{Semaphores: w, WaitValue: 1, Done: 1, DoneValue: 1, Status: -1}
	job, err := p.Store(t.Context(), 0, 0, []client.StoreChunk{chunkOf(0, 0)}, client.WithTimeline(order))
	testenv.OK(t, err)
	testenv.OK(t, f.Truncate(0))
	if res, err := job.Published(t.Context()); err != nil || !res.Cancelled {
		t.Errorf("cancelled store: got %+v, %v", res, err)
	}
	testenv.NoError(t, p.Ping(t.Context()))
}
