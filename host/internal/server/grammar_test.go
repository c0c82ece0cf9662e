package server

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/budget"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/transfer"
	protobuf "google.golang.org/protobuf/proto"
)

// grammar makes messages of a hostile client: mostly such as a host takes, with what a broken client would say in any place.
// Its choices come from bytes, so that a fuzzer can change them, and then from a seed.
type grammar struct {
	data []byte
	rng  *rand.Rand // nil: all further choices are 0
	id   uint64
	tag  uint64 // descriptors up to this one were sent
}

// pick chooses below n.
func (g *grammar) pick(n int) int {
	switch {
	case len(g.data) > 0:
		b := int(g.data[0])
		g.data = g.data[1:]
		return b % n
	case g.rng != nil:
		return g.rng.IntN(n)
	}
	return 0
}

// over says whether nothing is left of a fuzzer's bytes.
func (g *grammar) over() bool { return len(g.data) == 0 && g.rng == nil }

// odd is a number that is small, or one that breaks things.
func (g *grammar) odd() uint64 {
	edges := []uint64{0, 1, 2, 63, 64, 1 << 16, math.MaxInt32, math.MaxUint32, 1 << 62, math.MaxInt64, math.MaxUint64}
	if g.pick(8) == 0 {
		return edges[g.pick(len(edges))]
	}
	return uint64(g.pick(6))
}

// earlier is the number of an earlier message, mostly.
func (g *grammar) earlier() uint64 { return g.id - min(g.id, g.odd()) }

// ownKeys are keys that a hostile client stores: an honest one that stores others has none of them.
const ownKeys = 1 << 20

func (g *grammar) key(own bool) []byte {
	n := g.pick(48)
	if own || g.pick(2) == 0 {
		n += ownKeys
	}
	k := key(n)
	if g.pick(40) == 0 {
		return k[:g.pick(32)]
	}
	return k[:]
}

func (g *grammar) keys() (list []byte) {
	for range g.pick(20) {
		list = append(list, g.key(false)...)
	}
	return list
}

func (g *grammar) blocks(holes bool) (list []uint32) {
	n := chunkBlocks
	if g.pick(30) == 0 {
		n = g.pick(9)
	}
	for range n {
		switch b := uint32(g.pick(arenaBlocks)); {
		case g.pick(40) == 0:
			list = append(list, uint32(g.odd()))
		case holes && g.pick(8) == 0:
			list = append(list, abi.None)
		default:
			list = append(list, b)
		}
	}
	return list
}

func (g *grammar) group() uint32 { return []uint32{0, 0, 0, 5, 1, math.MaxUint32}[g.pick(6)] }

func (g *grammar) timeline() *proto.Timeline {
	if g.pick(3) > 0 {
		return nil
	}
	t := &proto.Timeline{Wait: protobuf.Uint32(uint32(g.odd())), WaitValue: uint64(g.pick(3)), Done: uint32(g.odd()), DoneValue: g.odd()}
	if g.pick(3) == 0 {
		status := uint32(g.odd())
		t.Status = &status
	}
	return t
}

func (g *grammar) register() *proto.Register {
	m := &proto.Register{Group: g.group()}
	n := planes
	if g.pick(20) == 0 {
		n = g.pick(9)
	}
	tag := g.tag
	if g.pick(10) == 0 {
		tag = g.odd()
	}
	for pl := range n {
		r := region(pl, tag)
		switch g.pick(60) {
		case 0:
			r.Offset = g.odd()
		case 1:
			r.Stride = g.odd()
		case 2:
			r.Blocks = uint32(g.odd())
		case 3:
			r.Plane = uint32(g.odd())
		case 4:
			r.Handle = &proto.Region_CudaIpc{CudaIpc: make([]byte, g.pick(80))}
		case 5:
			r.Handle = nil
		}
		m.Regions = append(m.Regions, r)
	}
	return m
}

// region is one as it should be.
func region(plane int, tag uint64) *proto.Region {
	return &proto.Region{Plane: uint32(plane), Handle: &proto.Region_Memfd{Memfd: tag}, Offset: uint64(base(0, plane%planes)),
		Stride: pageBytes, Blocks: arenaBlocks}
}

// next is the next message.
func (g *grammar) next() *proto.SessionRequest {
	if g.id++; g.pick(50) == 0 {
		return &proto.SessionRequest{Id: g.earlier()} // an id that was there, and nothing else
	}
	m := &proto.SessionRequest{Id: g.id}
	switch g.pick(25) {
	case 0, 1, 2, 3, 4:
		b := &proto.Store{Request: uint32(g.pick(4)), Group: g.group(), Timeline: g.timeline()}
		for range 1 + g.pick(12) {
			c := &proto.StoreChunk{Key: g.key(true), Depth: uint32(g.odd()), Blocks: g.blocks(false)}
			if g.pick(2) == 0 {
				c.Parent = g.key(true)
			}
			b.Chunks = append(b.Chunks, c)
		}
		m.Body = &proto.SessionRequest_Store{Store: b}
	case 5, 6, 7, 8:
		b := &proto.Load{Lease: g.odd()<<groupBits | uint64(g.pick(3)), Timeline: g.timeline(), Layers: g.pick(3) == 0}
		for i := range 1 + g.pick(6) {
			b.Chunks = append(b.Chunks, &proto.LoadChunk{Index: uint32(i + g.pick(2)), Blocks: g.blocks(true)})
		}
		m.Body = &proto.SessionRequest_Load{Load: b}
	case 9, 10, 11, 12:
		m.Body = &proto.SessionRequest_Lookup{Lookup: &proto.Lookup{Request: uint32(g.pick(4)), Group: g.group(), Keys: g.keys(),
			First: uint32(g.odd()), Readers: uint64(g.pick(3)), Prefetch: g.pick(2) == 1}}
	case 13:
		m.Body = &proto.SessionRequest_Release{Release: &proto.Release{Lease: g.odd()<<groupBits | uint64(g.pick(3))}}
	case 14:
		m.Body = &proto.SessionRequest_Discard{Discard: &proto.Discard{Group: g.group(), Keys: g.keys()}}
	case 15, 16:
		m.Body = &proto.SessionRequest_Cancel{Cancel: &proto.Cancel{Job: g.earlier()}}
	case 17:
		b := &proto.AwaitCopies{}
		for range g.pick(4) {
			b.Jobs = append(b.Jobs, g.earlier())
		}
		m.Body = &proto.SessionRequest_AwaitCopies{AwaitCopies: b}
	case 18:
		m.Body = &proto.SessionRequest_EndRequest{EndRequest: &proto.EndRequest{Request: uint32(g.pick(4)),
			Reason: proto.EndReason(g.odd()), Priority: int32(g.odd())}}
	case 19:
		m.Body = &proto.SessionRequest_Register{Register: g.register()}
	case 20:
		m.Body = &proto.SessionRequest_Unregister{Unregister: &proto.Unregister{Group: g.group()}}
	case 21:
		b := &proto.Semaphores{Offset: g.odd(), Count: uint32(g.odd()), Handle: &proto.Semaphores_Memfd{Memfd: g.tag}}
		if g.pick(2) == 0 {
			b.Offset, b.Count = 64, 16
		}
		m.Body = &proto.SessionRequest_Semaphores{Semaphores: b}
	case 22:
		m.Body = &proto.SessionRequest_Withdrawals{Withdrawals: &proto.Withdrawals{Memfd: g.tag, Offset: 8 * g.odd()}}
	default:
		m.Body = &proto.SessionRequest_Ping{Ping: &proto.Ping{}}
		if g.pick(8) == 0 {
			m.Body = greeting("again").Body
		}
	}
	return m
}

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
	x.memory.regs[0] = &registration{units: 1, group: &x.ns.Groups[0], memory: mem}
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
