package budget

import (
	"errors"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/kv"
)

func small(t *testing.T) *Budget {
	t.Helper()
	b, err := New(Config{Of: "memory", Limit: 1100, Own: 100, Holders: 10, Least: 50, Parts: []string{"a", "b"}, Advice: "give some back"})
	testenv.OK(t, err)
	return b
}

func join(t *testing.T, b *Budget, name string, tenant uint32) *Holder {
	t.Helper()
	h, err := b.Join(name, tenant)
	testenv.OK(t, err)
	return h
}

// fill takes for a holder until it is refused, and returns what it holds.
func fill(h *Holder) int64 {
	for h.Take(0, 1) == nil {
	}
	return h.Held()
}

// One holder borrows a part, two of a tenant less each, and those of another tenant have as much as the first tenant leaves.
func TestShares(t *testing.T) {
	b := small(t)
	h := join(t, b, "greedy", 1)
	if n := fill(h); n != 50+500/4 {
		t.Fatalf("alone it holds %d", n)
	}
	var refusal *Refusal
	err := h.Take(1, 7)
	if !errors.Is(err, ErrShare) || !errors.As(err, &refusal) || refusal.Wanted != 7 || refusal.Held != 175 ||
		refusal.Holder != "greedy" || !strings.Contains(err.Error(), "give some back") {
		t.Fatal(err)
	}
	same := fill(join(t, b, "another", 1))
	other := fill(join(t, b, "stranger", 2))
	if same <= 50 || same >= 175 || other <= same-50 {
		t.Fatalf("of the same tenant: %d, of another: %d", same, other)
	}
}

// However greedy the others are, each holder gets its own part, up to the last one that may come.
func TestOwnPartIsKept(t *testing.T) {
	b := small(t)
	for i := range 10 {
		h := join(t, b, "greedy", uint32(i%3))
		if err := h.Take(1, 50); err != nil {
			t.Fatalf("holder %d: %v", i, err)
		}
		fill(h)
	}
	if _, err := b.Join("eleventh", 0); !errors.Is(err, ErrHolders) {
		t.Fatal(err)
	}
	if f := b.Figures(1); f.Held > f.Limit-f.Own || f.Holders != 10 || len(f.Most) != 1 || f.Most[0].Held != 175 || f.Refused == 0 {
		t.Fatalf("with ten greedy holders the figures are %+v", f)
	}
}

// What is given back can be borrowed again, and a holder that has left counts until it holds nothing.
func TestGivenBack(t *testing.T) {
	b := small(t)
	h := join(t, b, "one", 1)
	n := fill(h)
	h.Leave()
	h.Leave()
	if f := b.Figures(0); f.Holders != 0 || f.Held != n || f.Parts["a"] != n {
		t.Fatalf("after the holder left the figures are %+v, want %d held", f, n)
	}
	h.Give(0, n)
	if f := b.Figures(0); f.Holders != 0 || f.Held != 0 || len(b.tenants) != 0 || b.loans != 0 {
		t.Fatalf("after everything was given back the figures are %+v", f)
	}
	if again := fill(join(t, b, "two", 1)); again != n {
		t.Fatalf("%d, and %d before", again, n)
	}
}

// Holders that come, take all they get and leave do not exceed the limit: at last no more may come, until some is given back.
func TestLeavingDoesNotExceedTheLimit(t *testing.T) {
	b := small(t)
	var last *Holder
	var err error
	for {
		var h *Holder
		if h, err = b.Join("hit and run", 1); err != nil {
			break
		}
		last = h
		fill(h)
		h.Leave()
		if f := b.Figures(0); f.Held > f.Limit-f.Own {
			t.Fatalf("more is held than the limit allows: %+v", f)
		}
	}
	if !errors.Is(err, ErrShare) {
		t.Fatal(err)
	}
	last.Give(0, last.Held())
	join(t, b, "next", 2)
}

// A holder whose tenant becomes known takes what it holds along.
func TestTenantBecomesKnown(t *testing.T) {
	b := small(t)
	h := join(t, b, "stranger", 0)
	n := fill(h)
	h.Is("session 7", 7)
	if b.tenants[0] != nil || b.tenants[7].held != n || b.tenants[7].loans != n-50 {
		t.Fatalf("the tenants have %+v, want %d held by tenant 7", b.tenants, n)
	}
	if f := b.Figures(5); f.Most[0] != (Share{"session 7", 7, n}) {
		t.Fatalf("the largest holders are %+v, want session 7 with %d", f.Most, n)
	}
}

func TestTooSmallToDivide(t *testing.T) {
	for _, c := range []Config{{Limit: 100, Own: 100}, {Limit: 1000, Holders: 100, Least: 6}} {
		if _, err := New(c); !errors.Is(err, ErrConfig) {
			t.Errorf("making a budget of %+v: got %v, want %v", c, err, ErrConfig)
		}
	}
}

// Whatever holders do, the limit holds, and the sums are those of the holders.
func TestRandomHolders(t *testing.T) {
	randomHolders(t, small(t))
	b := small(t)
	b.cfg.First = true
	randomHolders(t, b)
}

func randomHolders(t *testing.T, b *Budget) {
	const seed = 7
	rng := rand.New(rand.NewPCG(seed, 0))
	var list, gone []*Holder
	for step := range 50_000 {
		switch i := rng.IntN(len(list) + 1); {
		case i == len(list):
			if h, err := b.Join("h", rng.Uint32N(4)); err == nil {
				list = append(list, h)
			}
		case rng.IntN(50) == 0:
			h := list[i]
			list = append(list[:i], list[i+1:]...)
			h.Leave()
			if rng.IntN(2) == 0 {
				gone = append(gone, h)
			} else {
				giveAll(h)
			}
		case len(gone) > 0 && rng.IntN(20) == 0:
			giveAll(gone[0])
			gone = gone[1:]
		case rng.IntN(20) == 0:
			list[i].Is("h", rng.Uint32N(4))
		case rng.IntN(2) == 0:
			_ = list[i].Take(rng.IntN(2), rng.Int64N(100))
		default:
			part := rng.IntN(2)
			list[i].Give(part, rng.Int64N(list[i].parts[part]+1))
		}
		var held, loans int64
		for h := range b.holders {
			held += h.held
			loans += h.borrowed()
			if !h.left && h.may() < b.each {
				t.Fatalf("step %d of seed %d: a holder may have less than its own part", step, seed)
			}
		}
		if held != b.held || loans != b.loans || held > b.cfg.Limit-b.cfg.Own || b.active != len(list) {
			t.Fatalf("step %d of seed %d: held %d of %d, borrowed %d of %d", step, seed, b.held, held, b.loans, loans)
		}
	}
}

func giveAll(h *Holder) {
	for part, n := range h.parts {
		h.Give(part, n)
	}
}

// A budget whose shares are too small for what its holders need gives each tenant a first one, and each holder as long as its
// tenant has no more than half. What is more than all of it is given to one holder at a time.
func TestFirst(t *testing.T) {
	b, err := New(Config{Of: "room", Limit: 32, Holders: 100, Parts: []string{"waiting"}, First: true})
	testenv.OK(t, err)
	take := func(h *Holder, n int64, want bool) {
		t.Helper()
		if err := h.Take(0, n); (err == nil) != want || err != nil && !errors.Is(err, ErrShare) {
			t.Fatalf("taking %d: got %v, want success: %t", n, err, want)
		}
	}
	a1, a2, a3, b1 := join(t, b, "a1", 1), join(t, b, "a2", 1), join(t, b, "a3", 1), join(t, b, "b1", 2)
	take(a1, 8, true)
	take(a1, 8, false) // its second
	take(a2, 8, true)
	take(a3, 8, false) // its tenant has half
	take(b1, 12, true)
	take(join(t, b, "c1", 3), 8, false) // that would be more than all
	take(join(t, b, "c2", 3), 4, true)
	for _, h := range []*Holder{a1, a2, b1} {
		giveAll(h)
	}
	take(a3, 40, false)
	for h := range b.holders {
		giveAll(h)
	}
	take(a3, 40, true)
	take(b1, 1, false)
}

// Another sum is divided anew: holders keep what they have, and get what the new shares allow.
func TestDivideAs(t *testing.T) {
	b := small(t)
	h := join(t, b, "first", 1)
	held := fill(h)
	less, err := New(Config{Of: "memory", Limit: 300, Own: 100, Holders: 2, Least: 50, Parts: []string{"a", "b"}})
	testenv.OK(t, err)
	b.DivideAs(less)
	if h.Take(0, 1) == nil || h.Held() != held {
		t.Errorf("it holds %d of less, %d before", h.Held(), held)
	}
	h.Give(0, held)
	if n := fill(h); n >= held || n != less.Alone() {
		t.Errorf("it holds %d of less", n)
	}
	b.DivideAs(small(t))
	if n := fill(h); n != held {
		t.Errorf("it holds %d of as much as before, %d before", n, held)
	}
	h.Give(0, held)
	h.Leave()
}

// A user's connections leave half of them to others, but for the operator's.
func TestHalfIsForOthers(t *testing.T) {
	b, err := New(Config{Of: "connections", Limit: 1000, Holders: 10, Half: true, Parts: []string{"a"}})
	testenv.OK(t, err)
	for range 5 {
		join(t, b, "crowd", 7)
	}
	if _, err := b.Join("crowd", 7); !errors.Is(err, ErrHolders) {
		t.Errorf("a user's sixth of ten: %v, want %v", err, ErrHolders)
	}
	for range 5 {
		join(t, b, "operator", 0)
	}
}

// closed says whether a connection was closed.
type closed bool

func (c *closed) Close() error { *c = true; return nil }

// A client that opens connection after connection pushes out its own, the first ones first, and never another's: what that
// has sent may not have been read yet.
func TestCrowdsPushOutTheirOwn(t *testing.T) {
	const most = 8
	open := &Connections{Of: "connections", Max: most}
	var other, first closed
	open.Add(&other, "other")
	open.Add(&first, "crowd")
	for range most - 2 {
		open.Add(new(closed), "crowd")
	}
	if first {
		t.Fatal("the first connection is closed while there is room, want it open")
	}
	for range 3 * most {
		open.Add(new(closed), "crowd")
	}
	if n := open.Figures().Held; !bool(first) || bool(other) || n != most {
		t.Errorf("%d are open, want %d; the crowd's first was closed: %t, the other client's: %t", n, most, first, other)
	}
	for i := range 2 * most { // a crowd of clients cannot keep it full either
		open.Add(new(closed), strconv.Itoa(i))
	}
	if f := open.Figures(); f.Held != most || f.Refused != 5*most {
		t.Errorf("after crowds the figures are %+v, want %d open and %d closed for others", f, most, 5*most)
	}
}

// paceRig is sessions of tenants on so many processors.
func paceRig(t *testing.T, tenants ...uint32) (list []*Session) {
	memory, err := OfMemory(1<<30, 0, 8)
	testenv.OK(t, err)
	b := &Sessions{
		Memory: memory, Descriptors: OfDescriptors(8), Mappings: OfMappings(8), Room: OfRoom(1<<30, 8), Leased: OfLeased(1<<30, 8),
		Processors: 2,
	}
	for i, tenant := range tenants {
		s, err := b.New(uint64(i))
		testenv.OK(t, err)
		testenv.NoError(t, s.Greeted(uint64(i), &proto.Hello{Tenant: tenant}))
		t.Cleanup(func() {
			s.Leave()
			if n := len(b.pace.tenants); i == 0 && n != 0 {
				t.Errorf("%d tenants are left of sessions that ended", n)
			}
		})
		list = append(list, s)
	}
	return list
}

// handle is a message of a weight that takes some time to handle, and returns the pause after it.
func handle(s *Session, weight int64, took time.Duration) time.Duration {
	s.weight = weight
	since := time.Now()
	time.Sleep(took)
	return s.Spent(since)
}

// TestPace: among others, what a tenant sends takes half of the two processors in the long run; another, which does little, is not
// paused.
func TestPace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		list := paceRig(t, 1, 2)
		greedy, modest := list[0], list[1]
		const took, weight = 500 * time.Microsecond, 100_000
		began, busy := time.Now(), time.Duration(0)
		for range 1000 {
			if d := handle(modest, 100, 10*time.Microsecond); d != 0 {
				t.Fatalf("the modest tenant pauses for %v", d)
			}
			d := handle(greedy, weight, took)
			busy += spentOn(weight, took)
			time.Sleep(d)
		}
		if part := float64(busy) / float64(time.Since(began)); part < 0.9 || part > 1.1 {
			t.Errorf("the greedy tenant has %.2f processors, want half of 2", part)
		}
	})
}

// TestPaceAlone: a tenant that is alone, or beside one that sends nothing, never pauses.
func TestPaceAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		list := paceRig(t, 1, 2)
		handle(list[1], 100, time.Millisecond)
		time.Sleep(2 * paceWindow)
		for n := range 100 {
			if d := handle(list[0], 1<<20, 5*time.Millisecond); d != 0 {
				t.Fatalf("a pause of %v after %d messages", d, n)
			}
		}
	})
}

// TestPaceOfWhatWaits: a message that waited for long, as for a disk, counts by its weight.
func TestPaceOfWhatWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		list := paceRig(t, 1, 2)
		since := time.Now()
		time.Sleep(time.Minute)
		handle(list[1], 100, time.Microsecond)
		list[0].weight = 100
		if d := list[0].Spent(since); d != 0 {
			t.Errorf("a pause of %v", d)
		}
	})
}

// A trace context is held as long as its message, however long it is.
func TestTraceparentHasWeight(t *testing.T) {
	m := &proto.SessionRequest{Traceparent: string(make([]byte, 1<<20)), Body: &proto.SessionRequest_Load{Load: &proto.Load{}}}
	if n := weigh(m, 1); n < 1<<20 {
		t.Errorf("a mebibyte weighs %d", n)
	}
}

// A message's decoded elements count, not its bytes on the wire.
func TestWeight(t *testing.T) {
	empty := &proto.Store{}
	for range 1000 {
		empty.Chunks = append(empty.Chunks, &proto.StoreChunk{})
	}
	if n := weigh(&proto.SessionRequest{Body: &proto.SessionRequest_Store{Store: empty}}, 1); n < 1000*100 {
		t.Errorf("a thousand empty chunks weigh %d", n)
	}
}

// A chunk of a session with several units is as many tasks, whatever HELLO claims.
func TestUnitsHaveWeight(t *testing.T) {
	load := &proto.SessionRequest{Id: 2, Body: &proto.SessionRequest_Load{Load: &proto.Load{Chunks: make([]*proto.LoadChunk, 100)}}}
	for _, c := range []struct {
		units, tensor uint32
		tasks         int64
	}{{0, 0, 1}, {8, 1, 8}, {8, 4, 2}, {2, 8, 1}, {1 << 31, 0, kv.MaxRanks}} {
		s := paceRig(t, 1)[0]
		hello := &proto.Hello{Namespace: &proto.Namespace{Units: c.units, TensorParallel: c.tensor}}
		testenv.OK(t, s.Received(&proto.SessionRequest{Id: 1, Body: &proto.SessionRequest_Hello{Hello: hello}}))
		before := s.Held()
		testenv.OK(t, s.Received(load))
		if got, least := s.Held()-before, 100*c.tasks*jobBytes; got < least || got > 2*least {
			t.Errorf("100 chunks of %d units in %d ranks weigh %d, want at least %d", c.units, c.tensor, got, least)
		}
		s.Unanswered(1)
		s.Unanswered(2)
	}
}
