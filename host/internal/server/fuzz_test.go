package server

import (
	"testing"

	protobuf "google.golang.org/protobuf/proto"

	"github.com/kvhost/kvhost/host/internal/budget"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/transfer"
)

// FuzzMessages gives a greeted session with registered pages any three messages: each is answered, or is a job that is
// completed, and nothing panics.
func FuzzMessages(f *testing.F) {
	k := key(1)
	packed := proto.PackKeys(keys(3), 32)
	for _, m := range []*proto.SessionRequest{
		{}, greeting("f"), lookupOf(1), endOf(1),
		{Body: &proto.SessionRequest_Lookup{Lookup: &proto.Lookup{Keys: packed, First: 1, Group: 5, Readers: 1}}},
		{Body: &proto.SessionRequest_Release{Release: &proto.Release{Lease: 1}}},
		{Body: &proto.SessionRequest_Load{Load: &proto.Load{Lease: 1, Layers: true, Chunks: []*proto.LoadChunk{{Blocks: blocks(0)}}}}},
		{Body: &proto.SessionRequest_Store{Store: &proto.Store{Request: 2,
			Chunks: []*proto.StoreChunk{{Key: k[:], Parent: packed[:32], Blocks: blocks(1)}}}}},
		{Body: &proto.SessionRequest_Discard{Discard: &proto.Discard{Keys: packed}}},
		{Body: &proto.SessionRequest_Cancel{Cancel: &proto.Cancel{Job: 2}}},
		{Body: &proto.SessionRequest_AwaitCopies{AwaitCopies: &proto.AwaitCopies{Jobs: []uint64{1, 2}}}},
		{Body: &proto.SessionRequest_Register{Register: &proto.Register{Group: 5,
			Regions: []*proto.Region{{Handle: &proto.Region_Memfd{Memfd: 1}}}}}},
		{Body: &proto.SessionRequest_Unregister{Unregister: &proto.Unregister{}}},
		{Body: &proto.SessionRequest_Ping{}},
	} {
		b, err := protobuf.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b, b, b)
	}
	data := make([]byte, planes*pageBytes*arenaBlocks)
	b := &fakeStore{}
	server := fakeServer(f, Config{}, b)
	storeKeys(f, server, 3)
	f.Fuzz(func(t *testing.T, first, second, third []byte) {
		s := newServer(server.cfg, b)
		fuzzed := newFuzzed(t, s, data)
		for i, raw := range [][]byte{first, second, third} {
			m := &proto.SessionRequest{}
			if protobuf.Unmarshal(raw, m) != nil {
				continue
			}
			m.Id = uint64(i) + 2
			fuzzed.say(t, m)
			s.work.Wait()
			fuzzed.x.jobs.waiters.Wait()
			if !answered(fuzzed.x, m.Id) {
				t.Fatalf("no answer to %v", m)
			}
		}
		fuzzed.end(t)
	})
}

// fuzzed is a session without a socket that the test's own goroutine runs.
type fuzzed struct {
	s *Server
	x *session
}

// newFuzzed makes a greeted session with pages for its first group.
func newFuzzed(t *testing.T, s *Server, pages []byte) *fuzzed {
	x, err := s.admit(&fakeStream{ctx: t.Context()})
	if err != nil {
		t.Fatal(err)
	}
	hello := greeting("f")
	hello.Id = 1
	x.receive(hello)
	mem, err := transfer.NewHostMemory(x.ns.Groups[0].Geometry, regionsOf(pages))
	if err != nil {
		t.Fatal(err)
	}
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
	if err := f.x.out.Run(func(*proto.SessionResponse) error { return nil }); err != nil {
		t.Fatal(err)
	}
	if left := f.s.Stats(); left != (Stats{}) {
		t.Fatalf("left: %+v", left)
	}
	for _, b := range []*budget.Budget{f.s.budgets.Memory, f.s.budgets.Descriptors, f.s.budgets.Room} {
		if left := b.Figures(1); left.Held != 0 || left.Holders != 0 {
			t.Fatalf("held: %+v", left)
		}
	}
}

// answered takes what is queued, and looks for the last answer to a message.
func answered(x *session, id uint64) (found bool) {
	queued, _ := x.out.Take(nil)
	for _, m := range queued {
		x.share.Sent(m.Bytes)
		switch m.Body.(type) {
		case *proto.SessionResponse_StoreRead, *proto.SessionResponse_LoadLayer:
		default:
			found = found || m.Id == id
		}
	}
	return found
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
	if err := w.close(); err != nil {
		t.Fatal(err)
	}
}
