package server

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/budget"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
	"github.com/kvhost/kvhost/host/kv"
)

// discards discards the keys with these numbers and compares the results.
func (p *peer) discards(ns []int, want ...client.DiscardResult) {
	p.t.Helper()
	list := keys(0)
	for _, n := range ns {
		list = append(list, key(n))
	}
	got, err := p.Discard(p.t.Context(), 0, list)
	testenv.OK(p.t, err)
	if !slices.Equal(got, want) {
		p.t.Errorf("discard of %d: %v, want %v", ns, got, want)
	}
}

// A client removes what it stored, not what anybody uses, and readers of events hear of it.
func TestDiscard(t *testing.T) {
	r := newRig(t, nil)
	p := r.dial(nil)
	p.save(0, 3)
	events, _ := p.reads(client.Position{}, false)
	events.until("snapshot", func() bool { return len(events.have) == 3 })

	l := p.look(1)
	p.discards([]int{0, 1, 9}, client.InUse, client.Removed, client.Absent)
	events.until("one is gone", func() bool { return len(events.have) == 2 && !events.have[key(1)] })
	p.check(1) // the lease's entry is whole
	testenv.OK(t, l.Release(t.Context()))
	p.discards([]int{0}, client.Removed)
	if hits := p.look(1).Hits(); hits != 0 {
		t.Errorf("%d hits", hits)
	}
	p.save(0, 2)
	p.check(3)
}

// A load that has begun ends with all its bytes, and its entry stays.
func TestDiscardDuringLoad(t *testing.T) {
	r := newRig(t, nil)
	p := r.dial(nil)
	p.save(0, 1)
	rules, err := faultfs.ParseRules("read **: hang")
	testenv.OK(t, err)
	r.faults.Set(rules...)
	job := p.loads(p.look(1), 1)
	p.discards([]int{0}, client.InUse)
	r.faults.Set()
	if res := p.loaded(job); len(res.Failed) != 0 || !p.holds(0, 0) {
		t.Errorf("failed: %v", res.Failed)
	}
	p.discards([]int{0}, client.Removed)
}

func TestDiscardOfNothingIsRefused(t *testing.T) {
	r := newRig(t, func(c *Config, _ *store.Config) { c.Limits.KeysPerLookup = 4 })
	p := r.dial(nil)
	for _, c := range []struct {
		group uint32
		keys  int
		want  error
	}{{0, 0, client.ErrInvalid}, {0, 5, client.ErrLimit}, {3, 1, client.ErrUnknown}} {
		if _, err := p.Discard(t.Context(), c.group, keys(c.keys)); !errors.Is(err, c.want) {
			t.Errorf("group %d, %d keys: %v, want %v", c.group, c.keys, err, c.want)
		}
	}
}

// A disk that hangs while files are removed keeps neither PING nor the end of the session.
func TestDiscardOnAHungDisk(t *testing.T) {
	r := newRig(t, nil)
	p := r.dial(nil)
	p.save(0, 1)
	rules, err := faultfs.ParseRules("remove **: hang")
	testenv.OK(t, err)
	r.faults.Set(rules...)
	answered := make(chan error, 1)
	go func() {
		_, err := p.Discard(t.Context(), 0, keys(1))
		answered <- err
	}()
	until(t, "the removal begins", func() bool { return r.faults.Injected() > 0 })
	testenv.NoError(t, p.Ping(t.Context()))
	p.Close()
	if err := <-answered; !errors.Is(err, client.ErrClosed) {
		t.Error(err)
	}
	until(t, "the session ends", func() bool { return r.server.Stats().Sessions == 0 })
	r.faults.Release()
}

// Every result of the store has its own on the wire.
func TestDiscardResults(t *testing.T) {
	reply := discardReply([]store.DiscardResult{store.DiscardAbsent, store.DiscardRemoved, store.DiscardInUse,
		store.DiscardOtherTenant, store.DiscardUnavailable})
	seen := map[proto.DiscardResult]bool{proto.DiscardResult_DISCARD_RESULT_UNSPECIFIED: true}
	for _, result := range reply.Results {
		if seen[result] {
			t.Errorf("%v twice, or unspecified", result)
		}
		seen[result] = true
	}
}

// reader applies events to a set of keys.
type reader struct {
	t       *testing.T
	events  *client.Events
	have    map[kv.Key]bool
	started bool // a snapshot has ended, or the stream was resumed
	at      client.Position
}

func (p *peer) reads(from client.Position, all bool) (*reader, context.CancelFunc) {
	p.t.Helper()
	ctx, stop := context.WithCancel(p.t.Context())
	p.t.Cleanup(stop)
	e, err := p.Events(ctx, from, all)
	testenv.OK(p.t, err)
	return &reader{t: p.t.(*testing.T), events: e, have: map[kv.Key]bool{}, started: from != client.Position{}}, stop
}

// until applies batches until a condition holds.
func (r *reader) until(what string, holds func() bool) {
	r.t.Helper()
	for !r.started || !holds() {
		b, err := r.events.Next()
		if err != nil {
			r.t.Fatalf("next event, %s: %v", what, err)
		}
		if b.Snapshot && r.started {
			r.t.Logf("%s: a new snapshot", what)
			clear(r.have)
			r.started = false
		}
		for _, e := range b.Events {
			if e.Evicted {
				delete(r.have, e.Key)
			} else {
				r.have[e.Key] = true
			}
		}
		r.started = r.started || b.SnapshotEnd
		if !b.Snapshot || b.SnapshotEnd {
			r.at = b.After
		}
	}
}

// A reader starts with what is there, hears what comes and goes, and resumes where it was.
func TestEvents(t *testing.T) {
	r := newRig(t, func(_ *Config, s *store.Config) { s.Roots[0].Capacity = 3*pieceBytes + pieceBytes/2 })
	p := r.dial(nil)
	p.save(0, 2)
	first, stop := p.reads(client.Position{}, false)
	first.until("snapshot", func() bool { return len(first.have) == 2 })
	if !first.have[key(0)] || !first.have[key(1)] {
		t.Fatalf("snapshot: got %v, want the first two chunks", first.have)
	}
	p.save(2, 3)
	first.until("a chunk is stored", func() bool { return first.have[key(2)] })
	stop()
	p.save(3, 4) // another goes
	again, _ := p.reads(first.at, false)
	again.have = first.have
	again.until("resumed", func() bool { return again.have[key(3)] && len(again.have) == 3 })

	other := r.dial(func(h *client.Hello) { h.Engine, h.Namespace.Model = "other", "other" })
	elsewhere, _ := other.reads(client.Position{}, false)
	elsewhere.until("another namespace", func() bool { return true })
	if len(elsewhere.have) != 0 {
		t.Errorf("events of another namespace: %v", elsewhere.have)
	}
	all, _ := other.reads(client.Position{}, true)
	all.until("all namespaces", func() bool { return len(all.have) == 3 })

	stale, _ := p.reads(client.Position{Epoch: 1, Seq: 99}, false) // of an earlier run of the host
	stale.started = false
	stale.until("a position that the host does not know", func() bool { return len(stale.have) == 3 })
	r.store.Changes().Reset()
	again.started = true
	again.until("changes were lost", func() bool { return len(again.have) == 3 && again.at.Seq > first.at.Seq+2 })
}

// A connection has only as many streams of events as its share of the memory has room for, and what they take is counted.
func TestStreamsOfEventsAreBounded(t *testing.T) {
	r := newRig(t, func(c *Config, _ *store.Config) {
		c.Limits.Sessions = 8
		c.Arriving = budget.OfArriving(16<<20, 8)
	})
	p := r.dial(nil)
	before := figuresOf(r.server, "memory").Held
	open := 0
	var refused error
	for range 6 { // a connection may have as many calls, and its session
		ctx, stop := context.WithCancel(t.Context())
		t.Cleanup(stop)
		e, err := p.Events(ctx, client.Position{}, true)
		testenv.OK(t, err)
		if _, err := e.Next(); err == nil {
			open++
		} else if refused = err; !strings.Contains(err.Error(), "max_memory") {
			t.Fatalf("stream %d: %v, want a refusal that names max_memory", open, err)
		}
	}
	if open == 0 || refused == nil {
		t.Errorf("%d streams are open and the refusal is %v, want some of each", open, refused)
	}
	if f := figuresOf(r.server, "memory"); f.Parts["events"] < int64(open)<<19 || f.Held-before < f.Parts["events"] {
		t.Errorf("memory with %d streams: %+v, %d before; want them counted", open, f, before)
	}
	p.Close()
	until(t, "all is given back", func() bool { return figuresOf(r.server, "memory").Parts["events"] == 0 })
}

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
