package server

import (
	"errors"
	"os"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/proto"
)

// withdraws shares the word of withdrawals.
func (p *peer) withdraws() {
	p.t.Helper()
	a, err := p.NewArena(4096)
	testenv.OK(p.t, err)
	p.t.Cleanup(func() { a.Close() })
	testenv.OK(p.t, p.ShareWithdrawals(p.t.Context(), a, 8))
}

// heldStore stores chunk n from the place of its number, and the host reads it only once semaphore 0 has the value.
func (p *peer) heldStore(w *client.Semaphores, n int, value uint64) *client.StoreJob {
	p.t.Helper()
	p.fill(n, n)
	job, err := p.Store(p.t.Context(), 0, 0, []client.StoreChunk{{Key: key(n), Blocks: blocks(n)}},
		client.WithTimeline(&client.Timeline{Semaphores: w, WaitValue: value, Done: 1 + n, DoneValue: 1, Status: -1}))
	testenv.OK(p.t, err)
	return job
}

// A client takes stores back without a message, and uses their blocks at once. The host, which reads them later, publishes nothing of
// them; what it had read before, what another session stores, and what starts afterwards it does.
func TestWithdrawnStores(t *testing.T) {
	r := newRig(t, nil)
	p, other := r.dial(nil), r.dial(func(h *client.Hello) { h.Engine = "other" })
	w, theirs := p.share(), other.share()
	early := p.heldStore(w, 0, 1)
	if early.Withdraw() {
		t.Error("a store of a session without a word was withdrawn, want it refused")
	}
	p.withdraws()
	other.withdraws()
	first, second := p.heldStore(w, 1, 2), p.heldStore(w, 2, 2)
	beside := other.heldStore(theirs, 3, 1)
	p.fill(4, 4)
	read, err := p.store([]client.StoreChunk{{Key: key(4), Blocks: blocks(4)}})
	if err != nil || read.Chunks[0].Result != client.Stored {
		t.Fatalf("stored before the withdrawal: %+v, %v; want it stored", read, err)
	}
	if !second.Withdraw() {
		t.Fatal("a store was not withdrawn, want it taken back")
	}
	last := p.heldStore(w, 5, 3)
	p.poison(1)
	p.poison(2)
	w.Store(0, 3)
	theirs.Store(0, 1)
	for n, job := range map[int]*client.StoreJob{1: first, 2: second} {
		res, err := job.Published(t.Context())
		if err != nil || res.Chunks[0].Result != client.Failed || !errors.Is(res.Chunks[0].Err, client.ErrCancelled) {
			t.Errorf("withdrawn store of chunk %d: %+v, %v; want its chunk cancelled", n, res, err)
		}
	}
	for n, job := range map[int]*client.StoreJob{3: beside, 5: last} {
		if res, err := job.Published(t.Context()); err != nil || res.Chunks[0].Result != client.Stored {
			t.Errorf("store of chunk %d: %+v, %v; want it stored", n, res, err)
		}
	}
	if res, err := early.Published(t.Context()); err != nil || res.Chunks[0].Result != client.Stored {
		t.Errorf("store from before the word: %+v, %v; want it stored", res, err)
	}
	for n, want := range []int{1, 0, 0, 1, 1, 1} {
		l, err := p.Lookup(t.Context(), client.LookupRequest{Keys: keys(n + 1)[n:]})
		testenv.OK(t, err)
		if l.Hits() != want {
			t.Errorf("chunk %d: %d hits, want %d", n, l.Hits(), want)
			continue
		}
		if want == 0 {
			continue
		}
		load, err := p.Load(t.Context(), l, []client.LoadChunk{{Blocks: blocks(n)}}, client.LoadOptions{})
		testenv.OK(t, err)
		if res := p.loaded(load); len(res.Failed) > 0 || !p.holds(n, n) {
			t.Errorf("chunk %d: %+v, want the bytes from before", n, res)
		}
	}
	if files := r.temporaries(); len(files) > 0 {
		t.Errorf("left in the root: %v, want nothing of a withdrawn store", files)
	}
}

// A word must lie in memory that the host may map, once in a session. One that is gone later fails the stores that ask for it, and
// nothing else.
func TestWithdrawalsOfHostileClients(t *testing.T) {
	r := newRig(t, nil)
	p := r.dial(nil)
	raw := newTalk(t, r.server, greeting("raw"))
	m := &proto.SessionRequest{Body: &proto.SessionRequest_Withdrawals{Withdrawals: &proto.Withdrawals{Memfd: 77}}}
	if a := raw.ask(m); a.GetError().GetCode() != proto.Code_CODE_UNKNOWN {
		t.Errorf("a descriptor that did not come: %v, want it unknown", a)
	}
	testenv.NoError(t, raw.close())
	a, err := p.NewArena(4096)
	testenv.OK(t, err)
	defer a.Close()
	for _, off := range []int64{-8, 4, 4096, 1 << 40} {
		if err := p.ShareWithdrawals(t.Context(), a, off); !errors.Is(err, client.ErrArena) {
			t.Errorf("a word at %d of 4096 bytes: %v, want it refused here", off, err)
		}
	}
	f := sharedMemory(t, 4096)
	loose, err := client.OpenArena(f)
	testenv.OK(t, err)
	defer loose.Close()
	if err := p.ShareWithdrawals(t.Context(), loose, 0); !errors.Is(err, client.ErrArena) {
		t.Errorf("a word in memory that can shrink: %v, want it refused", err)
	}
	testenv.OK(t, p.ShareWithdrawals(t.Context(), a, 4088))
	if err := p.ShareWithdrawals(t.Context(), a, 0); !errors.Is(err, client.ErrBusy) {
		t.Errorf("a second word: %v, want the session to have one already", err)
	}
	p.save(0, 1)

	q := r.dial(func(h *client.Hello) { h.Engine, h.UnsealedMemory = "unsealed", true })
	testenv.OK(t, q.ShareWithdrawals(t.Context(), loose, 0))
	testenv.OK(t, os.Truncate(f.Name(), 0))
	q.fill(7, 7)
	res, err := q.store([]client.StoreChunk{{Key: key(7), Blocks: blocks(7)}})
	if err != nil || res.Chunks[0].Result != client.Failed || !errors.Is(res.Chunks[0].Err, client.ErrInvalid) {
		t.Errorf("a store whose word is gone: %+v, %v; want its chunk failed for the client's memory", res, err)
	}
	testenv.NoError(t, q.Ping(t.Context()))
	p.check(1)
}
