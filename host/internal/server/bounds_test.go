package server

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/budget"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
	"github.com/kvhost/kvhost/staging"
)

// What waits behind a DISCARD, which waits for a STORE that makes room, is bounded in bytes, and CANCEL is heard still.
func TestBacklogIsBounded(t *testing.T) {
	b := &fakeStore{hold: make(chan struct{})}
	s := fakeServer(t, Config{Memory: memoryOf(t, 64<<20, 4), Limits: Limits{Sessions: 4}}, b)
	w := newTalk(t, s, greeting("a"))
	x := only(s)
	pagesFor(t, x)
	job := w.say(storeOf(1))
	discard := proto.PackKeys(keys(1), 32)
	w.say(&proto.SessionRequest{Body: &proto.SessionRequest_Discard{Discard: &proto.Discard{Keys: discard}}})
	until(t, "the store makes room", func() bool { return x.reserving.Len() > 0 })
	for field, m := range map[string]*proto.SessionRequest{
		"keys":   {Body: &proto.SessionRequest_Lookup{Lookup: &proto.Lookup{Keys: make([]byte, (defaultKeys+1)*32)}}},
		"chunks": storeOf(defaultChunks + 1),
	} {
		if e := w.ask(m).GetError(); e.GetCode() != proto.Code_CODE_LIMIT || e.GetField() != field {
			t.Errorf("message above the limit of %s: got %v", field, e)
		}
	}
	packed := proto.PackKeys(keys(defaultKeys), 32)
	var last uint64
	waits := 0
	const may = 16 << 20 // a quarter of the memory is set aside for it, and it borrows a quarter of the other half
	for ; waits < 2*may/len(packed) && len(w.out) == 0; waits++ {
		last = w.say(&proto.SessionRequest{Body: &proto.SessionRequest_Lookup{Lookup: &proto.Lookup{Keys: packed}}})
		w.say(&proto.SessionRequest{Body: &proto.SessionRequest_Release{}})
	}
	if a := <-w.out; a.GetError().GetCode() != proto.Code_CODE_LIMIT || a.Id > last+1 {
		t.Fatalf("after %d: %v", waits, a)
	}
	if n := x.share.Held(); n > may || n < may/2 {
		t.Fatalf("the session holds %d bytes", n)
	}
	w.say(cancelOf(job))
	until(t, "all that waits is handled", func() bool { return x.inbox.Waiting() == 0 })
	until(t, "the memory is given back", func() bool { return x.share.Held() < 1<<20 })
	testenv.OK(t, w.close())
}

// CANCEL and AWAIT_COPIES that wait are bounded as jobs are.
func TestWaitersAreBounded(t *testing.T) {
	b := &fakeStore{hold: make(chan struct{})}
	s := fakeServer(t, Config{Limits: Limits{Jobs: 2}}, b)
	w := newTalk(t, s, greeting("a"))
	pagesFor(t, only(s))
	job := w.say(storeOf(1))
	await := func(jobs ...uint64) *proto.SessionRequest {
		return &proto.SessionRequest{Body: &proto.SessionRequest_AwaitCopies{AwaitCopies: &proto.AwaitCopies{Jobs: jobs}}}
	}
	if e := w.ask(await(job, job, job)).GetError(); e.GetCode() != proto.Code_CODE_LIMIT || e.GetField() != "jobs" {
		t.Fatal(e)
	}
	waiting := []uint64{w.say(await()), w.say(await(job))}
	if e := w.ask(await()).GetError(); e.GetCode() != proto.Code_CODE_LIMIT {
		t.Fatal(e)
	}
	cancel := w.say(cancelOf(job)) // never refused where nothing is to be waited for
	done := map[uint64]bool{}
	for len(done) < 3 {
		if a := <-w.out; a.GetDone() != nil {
			done[a.Id] = true
		} else if a.Id != job {
			t.Fatal(a)
		}
	}
	if !done[cancel] || !done[waiting[0]] || !done[waiting[1]] {
		t.Fatalf("done: %v", done)
	}
	testenv.OK(t, w.close())
}

// A queue is never given up, so what a client says of its device makes none.
func TestUnknownDevicesMakeNoQueues(t *testing.T) {
	s := fakeServer(t, Config{}, &fakeStore{})
	for i := range 3 {
		m := greeting("a")
		m.GetHello().DeviceUuid = fmt.Sprintf("GPU-00000000-0000-0000-0000-00000000000%d", i)
		testenv.OK(t, newTalk(t, s, m).close())
	}
	if queues := s.cfg.Engine.Queues(); len(queues) != 1 || queues[0].Device != "" {
		t.Fatalf("queues %+v", queues)
	}
}

func memoryOf(t testing.TB, limit int64, sessions int) *budget.Budget {
	t.Helper()
	b, err := budget.OfMemory(limit, 0, sessions)
	testenv.OK(t, err)
	return b
}

// Sessions that send stores while the disk hangs hold no more than the host's memory, and one that came late still has its
// part. All is given back.
func TestSessionsShareTheMemory(t *testing.T) {
	const limit, sessions = 96 << 20, 25
	b := &fakeStore{hold: make(chan struct{})}
	memory := memoryOf(t, limit, sessions)
	s := fakeServer(t, Config{Memory: memory, Limits: Limits{Sessions: sessions}}, b)
	before := heap()
	var list []*talk
	for i := range sessions - 1 {
		hello := greeting(string(rune('a' + i)))
		hello.GetHello().Tenant = uint32(i % 3)
		w := newTalk(t, s, hello)
		list = append(list, w)
		pagesFor(t, engineOf(s, hello.GetHello().Engine))
		for refused := false; !refused; {
			store := w.say(storeOf(1000))
			ping := w.say(&proto.SessionRequest{Body: &proto.SessionRequest_Ping{}})
			a := <-w.out
			if refused = a.Id == store && a.GetError().GetCode() == proto.Code_CODE_LIMIT; refused {
				a = <-w.out
			}
			if a.Id != ping {
				t.Fatal(a)
			}
		}
	}
	if grown := heap() - before; grown > limit {
		t.Errorf("%d sessions hold %d MiB of %d", sessions-1, grown>>20, limit>>20)
	}
	if f := memory.Figures(1); f.Held > limit || f.Refused == 0 {
		t.Errorf("memory of sessions: got %+v, want it within the limit, and refusals", f)
	}
	late := newTalk(t, s, greeting("late"))
	if a := late.ask(lookupOf(1)); a.GetLookup() == nil {
		t.Errorf("the late session: %v", a)
	}
	close(b.hold)
	for _, w := range append(list, late) {
		testenv.OK(t, w.close())
	}
	until(t, "all is given back", func() bool { return memory.Figures(0).Held == 0 })
}

// What a session has looked up once is not kept: sessions that once sent the largest LOOKUP hold little.
func TestLookupsLeaveLittle(t *testing.T) {
	const sessions = 24
	s := fakeServer(t, Config{}, &fakeStore{})
	many := proto.PackKeys(keys(1<<16), 32)
	var list []*talk
	for i := range sessions {
		list = append(list, newTalk(t, s, greeting(string(rune('a'+i)))))
	}
	before := heap()
	for _, w := range list {
		if a := w.ask(&proto.SessionRequest{Body: &proto.SessionRequest_Lookup{Lookup: &proto.Lookup{Keys: many}}}); a.GetLookup() == nil {
			t.Fatalf("lookup: %v, want an answer", a)
		}
	}
	if grown := heap() - before; grown > sessions*budget.LeastMemory {
		t.Errorf("%d sessions that looked much up hold %d KiB more each, want at most %d", sessions, grown/sessions>>10, budget.LeastMemory>>10)
	}
	for _, w := range list {
		testenv.OK(t, w.close())
	}
}

// A session maps only as many files as its share: the process has a limited number of mappings, and dies without them.
func TestMappingsAreShared(t *testing.T) {
	r := newRig(t, nil)
	one, err := budget.New(budget.Config{Of: "mappings", Limit: 2, Parts: []string{"files"}, Advice: "share fewer files"})
	testenv.OK(t, err)
	r.server.budgets.Mappings = one
	p := r.dial(nil) // one file is for both groups
	other, err := p.NewArena(planes * arenaBlocks * pageBytes)
	testenv.OK(t, err)
	t.Cleanup(func() { other.Close() })
	testenv.OK(t, p.regs[5].Unregister(t.Context()))
	if _, err := p.Register(t.Context(), 5, other, groupRegions(0)); !errors.Is(err, client.ErrLimit) || !strings.Contains(err.Error(), "share fewer") {
		t.Errorf("register a second file: %v, want a refusal that says what to do", err)
	}
	testenv.OK(t, p.regs[0].Unregister(t.Context()))
	if _, err := p.Register(t.Context(), 5, other, groupRegions(0)); err != nil {
		t.Errorf("register it once the first one is unmapped: %v, want none", err)
	}
	p.Close()
	until(t, "all is given back", func() bool { return one.Figures(0).Held == 0 })
}

// A client learns its own figures from a refusal, and nobody else's.
func TestRefusalNamesTheLimit(t *testing.T) {
	b := &fakeStore{hold: make(chan struct{})}
	s := fakeServer(t, Config{Memory: memoryOf(t, 8<<20, 4), Limits: Limits{Sessions: 4}}, b)
	w, other := newTalk(t, s, greeting("mine")), newTalk(t, s, greeting("theirs"))
	e := w.ask(storeOf(4000)).GetError()
	if e.GetCode() != proto.Code_CODE_LIMIT || !strings.Contains(e.GetMessage(), "max_memory") ||
		!strings.Contains(e.GetMessage(), "(mine)") || strings.Contains(e.GetMessage(), "theirs") {
		t.Errorf("refused message: got %v", e)
	}
	for _, w := range []*talk{w, other} {
		testenv.OK(t, w.close())
	}
}

// engineOf is the only session of an engine.
func engineOf(s *Server, engine string) *session {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, x := range s.sessions {
		if x.engine != nil && x.engine.key.id == engine {
			return x
		}
	}
	return nil
}

// fullRig is a host whose store holds three chunks of p and is full, and whose disk hangs when a victim is to go.
func fullRig(t *testing.T) (*rig, *peer) {
	r := newRig(t, func(_ *Config, s *store.Config) { s.Roots[0].Capacity = 3*pieceBytes + pieceBytes/2 })
	p := r.dial(nil)
	p.save(0, 3)
	r.faults.Set(faultfs.Rule{Op: staging.OpRename | staging.OpRemove, Path: "*", Fault: faultfs.Fault{Hang: true}})
	return r, p
}

// saveHanging begins a STORE that hangs in its reservation.
func (p *peer) saveHanging(r *rig) *client.StoreJob {
	p.t.Helper()
	p.fill(3, 3)
	job, err := p.Store(p.t.Context(), 0, 0, []client.StoreChunk{{Key: key(3), Blocks: blocks(3)}})
	testenv.OK(p.t, err)
	testenv.OK(p.t, r.faults.AwaitHanging(testenv.Context(p.t), 1))
	return job
}

// A STORE whose victim's file will not go holds up no LOOKUP and no LOAD of its session, and can be cancelled and fenced
// all the same.
func TestNothingWaitsForRoom(t *testing.T) {
	r, p := fullRig(t)
	early := p.look(1)
	save := p.saveHanging(r)
	for _, l := range []*client.Lookup{early, p.look(1)} {
		if l.Hits() != 1 {
			t.Fatalf("%d hits", l.Hits())
		}
		if load := p.loaded(p.loads(l, 1)); len(load.Failed) != 0 || !p.holds(0, 0) {
			t.Fatalf("load while a store waits: got %+v", load)
		}
	}
	testenv.OK(t, save.Cancel(t.Context()))
	res, err := save.Published(t.Context())
	if err != nil || !res.Cancelled || res.Chunks[0].Result != client.Failed ||
		!errors.Is(res.Chunks[0].Err, client.ErrCancelled) {
		t.Fatalf("cancelled store: got %+v, %v", res, err)
	}
	testenv.OK(t, errors.Join(p.AwaitCopies(t.Context()), p.regs[0].Unregister(t.Context())))
	until(t, "the load has used its lease up", func() bool { return r.server.Stats().Leases == 0 })
	if n := r.faults.Hanging(); n != 1 {
		t.Fatalf("%d calls hang", n)
	}
	// A session has one reservation at a time: the next waits for it, and can be cancelled too.
	next, err := p.Store(t.Context(), 0, 5, []client.StoreChunk{{Key: key(4), Blocks: blocks(0)}})
	testenv.OK(t, err)
	testenv.OK(t, errors.Join(next.Cancel(t.Context()), p.regs[5].Unregister(t.Context())))
	if n := r.server.Stats().ArenaBytes; n != 0 {
		t.Fatalf("%d bytes mapped", n)
	}
	r.faults.Release()
	r.faults.Set()
	<-only(r.server).reserving.Idle()
	if st := r.store.Stats().Roots[0]; st.Entries != 2 || len(r.temporaries()) != 0 {
		t.Fatalf("%+v, temporaries %v", st, r.temporaries())
	}
}

// The end of a session does not wait for a reservation either; the end of the host does.
func TestSessionEndDoesNotWaitForRoom(t *testing.T) {
	r, p := fullRig(t)
	q := r.dial(nil)
	before, mapped := r.server.Stats().ArenaBytes, mappings(t)
	p.saveHanging(r)
	p.Close()
	until(t, "the session is gone", func() bool { return r.server.Stats().Sessions == 1 })
	if st := r.server.Stats(); st.Jobs != 0 || st.ArenaBytes != before/2 || mappings(t) != mapped-1 {
		t.Fatalf("%+v, %d mappings less", st, mapped-mappings(t))
	}
	if l := q.look(3); r.faults.Hanging() != 1 {
		t.Fatalf("%d hits, %d calls hang", l.Hits(), r.faults.Hanging())
	}
	r.faults.Release()
	r.stop()
	testenv.OK(t, <-r.served)
	r.served <- nil
	if st := r.store.Stats().Roots[0]; st.Entries != 2 || len(r.temporaries()) != 0 {
		t.Fatalf("%+v, temporaries %v", st, r.temporaries())
	}
}

func TestLatencies(t *testing.T) {
	var l Latencies
	now := time.Now()
	l.Observe(AnswerLoad, now.Add(-time.Minute))   // above the last bound
	l.Observe(AnswerLoad, now.Add(30*time.Second)) // a clock that went back
	l.Observe(AnswerLoad, now.Add(-15*time.Second))
	for _, h := range l.Read() {
		if h.Answer != AnswerLoad {
			if h.Count != 0 {
				t.Errorf("%s has %d answers, want none", h.Answer, h.Count)
			}
			continue
		}
		last := len(h.Buckets) - 1
		if h.Count != 3 || h.Buckets[0] != 1 || h.Buckets[last] != 1 || h.Buckets[last-1] != 1 {
			t.Errorf("load: %d answers in %v, want one below 10us, one in 10 to 30s and one above", h.Count, h.Buckets)
		}
		if h.Sum < 75*time.Second {
			t.Errorf("load: sum %s, want at least 75s", h.Sum)
		}
	}
}

// TestTableIsBounded names more models than there are counters: clients choose the names.
func TestTableIsBounded(t *testing.T) {
	var table UsageTable
	for i := range 10 * maxPairs {
		table.Of(fmt.Sprintf("model-%04d", i), uint32(i)).Keys.Add(1)
	}
	if table.Of("model-0000", 0).Keys.Load() != 1 {
		t.Error("the first model lost its counter")
	}
	list := table.List()
	if len(list) != maxPairs+1 {
		t.Fatalf("%d counters, want %d and one for the others", len(list), maxPairs)
	}
	last := list[len(list)-1]
	if last.Model != otherModel || last.Keys.Load() != 9*maxPairs {
		t.Errorf("%q has %d keys, want %q with %d", last.Model, last.Keys.Load(), otherModel, 9*maxPairs)
	}
}
