package server

import (
	"context"
	"errors"
	"io"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/transfer"
)

// fakeStore is a store that refuses puts in turn, and can hold them up.
type fakeStore struct {
	chunkStore
	mu    sync.Mutex
	puts  int
	ended []uint32
	hints []abi.Hints
	seen  map[uint32]bool // request numbers of lookups
	hold  chan struct{}   // when not nil, puts wait for it or their context
	deaf  bool            // they do not hear of their context
	began chan struct{}   // when not nil, hears of each put
	under int             // puts that have not returned
	early bool            // a key was discarded while there was one
}

func (b *fakeStore) EndRequest(n uint32, h abi.Hints) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.ended, b.hints = append(b.ended, n), append(b.hints, h)
	b.chunkStore.EndRequest(n, h)
}

func (b *fakeStore) Lookup(q store.LookupRequest) (*store.Lease, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.seen == nil {
		b.seen = map[uint32]bool{}
	}
	b.seen[q.Request] = true
	return b.chunkStore.Lookup(q)
}

func (b *fakeStore) Discard(q store.DiscardRequest) ([]store.DiscardResult, error) {
	b.mu.Lock()
	b.early = b.early || b.under > 0
	b.mu.Unlock()
	return b.chunkStore.Discard(q)
}

func (b *fakeStore) Put(ctx context.Context, q store.PutRequest) (*store.Put, error) {
	b.mu.Lock()
	b.under++
	b.mu.Unlock()
	if b.began != nil {
		b.began <- struct{}{}
	}
	defer func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.under--
	}()
	if b.deaf {
		<-b.hold
	} else if b.hold != nil {
		select {
		case <-b.hold:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.puts++
	errs := []error{nil, nil, store.ErrResident, nil, store.ErrRefused, store.ErrNoSpace, io.ErrUnexpectedEOF}
	if err := errs[b.puts%len(errs)]; err != nil {
		return nil, err
	}
	return b.chunkStore.Put(ctx, q)
}

// fakeServer is a server without a socket, whose store is b before a real one.
func fakeServer(t testing.TB, cfg Config, b *fakeStore) *Server {
	t.Helper()
	st, err := store.Open(t.Context(), store.Config{
		Roots: []store.RootConfig{{Path: filepath.Join(t.TempDir(), "root"), Capacity: 256 << 20, MaxEntries: 1 << 16}},
	})
	testenv.OK(t, err)
	engine, err := transfer.New(transfer.Config{Threads: 2, SlotBytes: 1 << 20, MaxStaging: 4 << 20, ReadRatio: 0.5})
	testenv.OK(t, err)
	b.chunkStore, cfg.Engine = st, engine
	s := newServer(cfg, b)
	t.Cleanup(func() {
		s.work.Wait()
		testenv.NoError(t, errors.Join(engine.Close(), st.Close()))
	})
	return s
}

// fakeStream feeds a session with messages, then ends. Answers are given to seen.
type fakeStream struct {
	ctx  context.Context
	in   chan *proto.SessionRequest
	seen func(*proto.SessionResponse)
}

func (f *fakeStream) Context() context.Context { return f.ctx }

func (f *fakeStream) Send(m *proto.SessionResponse) error {
	if f.seen != nil {
		f.seen(m)
	}
	return nil
}

func (f *fakeStream) Recv() (*proto.SessionRequest, error) {
	select {
	case m, ok := <-f.in:
		if !ok {
			return nil, io.EOF
		}
		return m, nil
	case <-f.ctx.Done():
		return nil, f.ctx.Err()
	}
}

// talk is a session on a fake stream; the answers come on a channel.
type talk struct {
	t   testing.TB
	in  chan *proto.SessionRequest
	out chan *proto.SessionResponse
	end chan error
	id  uint64
}

func newTalk(t testing.TB, s *Server, hello *proto.SessionRequest) *talk {
	w := &talk{t: t, in: make(chan *proto.SessionRequest), out: make(chan *proto.SessionResponse, 1024), end: make(chan error, 1)}
	st := &fakeStream{ctx: t.Context(), in: w.in, seen: func(m *proto.SessionResponse) { w.out <- m }}
	go func() { w.end <- s.serve(st) }()
	if a := w.ask(hello); a.GetHello() == nil {
		t.Fatal(a)
	}
	return w
}

func (w *talk) say(m *proto.SessionRequest) uint64 {
	w.id++
	m.Id = w.id
	w.in <- m
	return w.id
}

func (w *talk) ask(m *proto.SessionRequest) *proto.SessionResponse {
	w.t.Helper()
	id := w.say(m)
	a := <-w.out
	if a.Id != id {
		w.t.Fatalf("answer to %d, want %d: %v", a.Id, id, a)
	}
	return a
}

func (w *talk) close() error {
	close(w.in)
	return <-w.end
}

func greeting(engine string) *proto.SessionRequest {
	ns := testNamespace()
	return &proto.SessionRequest{Body: &proto.SessionRequest_Hello{Hello: &proto.Hello{
		Protocol: proto.Protocol, Engine: engine, LocalRanks: 1, Namespace: proto.FromNamespace(&ns),
	}}}
}

func lookupOf(request uint32) *proto.SessionRequest {
	return &proto.SessionRequest{Body: &proto.SessionRequest_Lookup{Lookup: &proto.Lookup{
		Request: request, Keys: proto.PackKeys(keys(1), 32),
	}}}
}

func endOf(request uint32) *proto.SessionRequest {
	return &proto.SessionRequest{Body: &proto.SessionRequest_EndRequest{EndRequest: &proto.EndRequest{Request: request}}}
}

func storeOf(chunks int) *proto.SessionRequest {
	m := &proto.Store{}
	for i := range chunks {
		k := key(i)
		m.Chunks = append(m.Chunks, &proto.StoreChunk{Key: k[:], Blocks: blocks(0)})
	}
	return &proto.SessionRequest{Body: &proto.SessionRequest_Store{Store: m}}
}

func cancelOf(job uint64) *proto.SessionRequest {
	return &proto.SessionRequest{Body: &proto.SessionRequest_Cancel{Cancel: &proto.Cancel{Job: job}}}
}

// pagesFor registers pages of the first group, without a client.
func pagesFor(t testing.TB, x *session) {
	mem, err := transfer.NewHostMemory(x.ns.Groups[0].Geometry, regionsOf(make([]byte, planes*pageBytes*arenaBlocks)))
	testenv.OK(t, err)
	x.inbox.Turn.Lock()
	defer x.inbox.Turn.Unlock()
	x.memory.regs[0] = &registration{units: 1, group: &x.ns.Groups[0], memory: mem}
}

// Two engines may both have a request 7; the store must not take them for one. Two ranks of one engine share it, and
// the store hears of its end when both have ended it.
func TestRequestsAreTheEnginesOwn(t *testing.T) {
	b := &fakeStore{}
	s := fakeServer(t, Config{}, b)
	a1, a2, c := newTalk(t, s, greeting("a")), newTalk(t, s, greeting("a")), newTalk(t, s, greeting("c"))
	for _, w := range []*talk{a1, a2, c, a1} {
		w.ask(lookupOf(7))
	}
	c.ask(lookupOf(0))
	if len(b.seen) != 3 || !b.seen[0] {
		t.Fatalf("the store saw requests %v, want 0 and two others", b.seen)
	}
	a1.ask(endOf(7))
	a1.ask(endOf(7))
	if len(b.ended) != 0 {
		t.Fatalf("ended %v while a rank has not", b.ended)
	}
	last := endOf(7)
	last.GetEndRequest().Reason, last.GetEndRequest().Priority = proto.EndReason_END_REASON_TOOL_CALL, -2
	a2.ask(last)
	if len(b.ended) != 1 || b.hints[0] != (abi.Hints{Reason: abi.EndToolCall, Priority: -2}) {
		t.Fatalf("ended %v with %+v", b.ended, b.hints)
	}
	testenv.OK(t, errors.Join(a1.close(), a2.close(), c.close()))
	if len(b.ended) != 2 || b.ended[0] == b.ended[1] {
		t.Fatalf("ended %v: a session that goes ends its requests", b.ended)
	}
}

// While a STORE makes room, all is heard but what must come after it: other STOREs, and a DISCARD with what follows that.
func TestReaderDoesNotWaitForRoom(t *testing.T) {
	b := &fakeStore{hold: make(chan struct{}), began: make(chan struct{}, 2)}
	s := fakeServer(t, Config{}, b)
	w := newTalk(t, s, greeting("a"))
	x := only(s)
	pagesFor(t, x)
	first := w.say(storeOf(1))
	<-b.began
	second := w.say(storeOf(1))
	if w.ask(lookupOf(1)).GetLookup() == nil || w.ask(endOf(1)).GetDone() == nil {
		t.Fatal("the lookup or the end of its request waits for the stores")
	}
	discard := w.say(&proto.SessionRequest{Body: &proto.SessionRequest_Discard{Discard: &proto.Discard{
		Keys: proto.PackKeys(keys(1), 32)}}})
	look := w.say(lookupOf(2))
	w.ask(&proto.SessionRequest{Body: &proto.SessionRequest_Ping{}})
	if len(b.ended) != 0 {
		t.Error("policies heard of the end of a request before its stores")
	}
	for _, job := range []uint64{second, first} { // one that waits for its turn, and the one that has it
		w.say(cancelOf(job))
	}
	var order []uint64
	published := map[uint64]*proto.StorePublished{}
	for len(order) < 8 { // read and published of both, two cancels, the DISCARD, the lookup
		a := <-w.out
		order = append(order, a.Id)
		if p := a.GetStorePublished(); p != nil {
			published[a.Id] = p
		}
		if a.Id == look && !slices.Contains(order, discard) {
			t.Errorf("the lookup came before the DISCARD: %d", order)
		}
	}
	for _, id := range []uint64{first, second} {
		p := published[id]
		if p == nil || !p.Cancelled || p.Results[0] != proto.ChunkResult_CHUNK_RESULT_FAILED ||
			p.Failures[0].Code != proto.Code_CODE_CANCELLED {
			t.Errorf("store %d: %v", id, p)
		}
	}
	if b.puts != 0 || b.early {
		t.Errorf("%d chunks were reserved; discarded beside a store: %v", b.puts, b.early)
	}
	testenv.OK(t, w.close())
	if st := s.Stats(); st.Jobs != 0 || st.Sessions != 0 {
		t.Fatalf("figures after the end: got %+v, want none", st)
	}
}

func only(s *Server) *session {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, x := range s.sessions {
		return x
	}
	return nil
}

func regionsOf(data []byte) (list []transfer.HostRegion) {
	for pl := range planes {
		list = append(list, transfer.HostRegion{Data: data, Grid: transfer.Grid{Offset: base(0, pl), Stride: pageBytes, Blocks: arenaBlocks}})
	}
	return list
}

// Waiting says how many messages wait for their turn.
func (b *inbox) Waiting() int { return int(b.waiting.Load()) }

// Drain handles what waits, in tests without an executor.
func (b *inbox) Drain() {
	for len(b.backlog) > 0 {
		b.inTurn(<-b.backlog)
		b.waiting.Add(-1)
	}
}
