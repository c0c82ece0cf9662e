package server

import (
	"strings"
	"testing"

	"github.com/kvhost/kvhost/host/internal/budget"
	"github.com/kvhost/kvhost/host/internal/proto"
)

func memoryOf(t testing.TB, limit int64, sessions int) *budget.Budget {
	t.Helper()
	b, err := budget.OfMemory(limit, 0, sessions)
	if err != nil {
		t.Fatal(err)
	}
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
		if err := w.close(); err != nil {
			t.Fatal(err)
		}
	}
	until(t, "all is given back", func() bool { return memory.Figures(0).Held == 0 })
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
		if err := w.close(); err != nil {
			t.Fatal(err)
		}
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
