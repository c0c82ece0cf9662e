package server

import (
	"errors"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/budget"
	"github.com/kvhost/kvhost/host/internal/proto"
)

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
