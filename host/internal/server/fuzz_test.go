package server

import (
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/budget"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/transfer"
)

// fuzzed is a session without a socket that the test's own goroutine runs.
type fuzzed struct {
	s *Server
	x *session
}

// newFuzzed makes a greeted session with pages for its first group.
func newFuzzed(t *testing.T, s *Server, pages []byte) *fuzzed {
	x, err := s.admit(&fakeStream{ctx: t.Context()})
	testenv.OK(t, err)
	hello := greeting("f")
	hello.Id = 1
	x.receive(hello)
	mem, err := transfer.NewHostMemory(x.ns.Groups[0].Geometry, regionsOf(pages))
	testenv.OK(t, err)
	x.memory.regs[0] = &registration{group: &x.ns.Groups[0], memory: mem}
	return &fuzzed{s, x}
}

// say gives the session a message and handles what it queues.
func (f *fuzzed) say(t *testing.T, m *proto.SessionRequest) {
	f.x.receive(m)
	f.x.inbox.Drain()
}

// end ends the session. Nothing may be left of it.
func (f *fuzzed) end(t *testing.T) {
	f.x.end(errClientDone)
	f.x.teardown()
	f.s.dismiss(f.x)
	f.s.work.Wait()
	f.x.out.Close()
	testenv.OK(t, f.x.out.Run(func(*proto.SessionResponse) error { return nil }))
	if left := f.s.Stats(); left != (Stats{}) {
		t.Fatalf("left: %+v", left)
	}
	for _, b := range []*budget.Budget{f.s.budgets.Memory, f.s.budgets.Descriptors, f.s.budgets.Room} {
		if left := b.Figures(1); left.Held != 0 || left.Holders != 0 {
			t.Fatalf("held: %+v", left)
		}
	}
}

// storeKeys stores the first keys, so that lookups of them hit.
func storeKeys(t testing.TB, s *Server, n int) {
	t.Helper()
	w := newTalk(t, s, greeting("before"))
	pagesFor(t, only(s))
	for stored := 0; stored < n; { // some are refused, in turn
		id := w.say(storeOf(n))
		for {
			if p := (<-w.out).GetStorePublished(); p != nil {
				break
			}
		}
		found := w.ask(&proto.SessionRequest{Body: &proto.SessionRequest_Lookup{Lookup: &proto.Lookup{
			Keys: proto.PackKeys(keys(n), 32),
		}}})
		if stored = int(found.GetLookup().GetHits()); id > 100 {
			t.Fatalf("%d of %d keys are stored", stored, n)
		}
	}
	testenv.OK(t, w.close())
}
