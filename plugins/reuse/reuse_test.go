package reuse

import (
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/abi/testenv"
)

func policy(t testing.TB, config guest.Config) *Policy {
	t.Helper()
	p, err := New(guest.Info{Config: config})
	testenv.OK(t, err)
	return p
}

func ask(p *Policy, c abi.Candidate) bool {
	dst := []bool{false}
	p.Admit([]abi.Candidate{c}, dst)
	return dst[0]
}

// prompt is a request that stores chunks after a prefix that was there.
type prompt struct {
	request, first, chunks uint32
}

func (r prompt) key(i uint32) uint64 { return uint64(r.request)<<20 + uint64(i) + 1 }

func (r prompt) candidate(kind abi.CandidateKind, i, hits uint32) abi.Candidate {
	c := abi.Candidate{Kind: kind, Key: r.key(i), Depth: r.first + i, Hits: hits, To: 1}
	if kind == abi.KindNew {
		c.From, c.To, c.Request = abi.NoLevel, 0, r.request
	}
	if i > 0 {
		c.ParentKey = r.key(i - 1)
	}
	return c
}

// candidateTo is a demotion that would be refused between own levels.
func (r prompt) candidateTo(level uint8, i uint32) abi.Candidate {
	c := r.candidate(abi.KindDemotion, i, 0)
	c.To = level
	return c
}

func (r prompt) store(p *Policy) {
	for i := range r.chunks {
		ask(p, r.candidate(abi.KindNew, i, 0))
	}
}

// demoted are the answers when the level evicts all of it.
func (r prompt) demoted(p *Policy) (answers []bool) {
	for i := range r.chunks {
		answers = append(answers, ask(p, r.candidate(abi.KindDemotion, i, 0)))
	}
	return answers
}

func all(answers []bool, want bool) bool {
	for _, a := range answers {
		if a != want {
			return false
		}
	}
	return true
}

// Short prompts come back, long ones do not: after some of each, long ones are refused. When long ones come back, they
// are admitted again.
func TestKinds(t *testing.T) {
	p := policy(t, nil)
	next := uint32(1)
	long, short := prompt{chunks: 40}, prompt{first: 3, chunks: 4}
	round := func(longReturns bool) (l, s []bool) {
		long.request, short.request = next, next+1
		next += 2
		long.store(p)
		short.store(p)
		l, s = long.demoted(p), short.demoted(p)
		for i := range short.chunks {
			ask(p, short.candidate(abi.KindPromotion, i, 1)) // it is loaded
		}
		if longReturns {
			long.store(p) // it was not kept: it comes anew
		}
		return l, s
	}
	l, s := round(false)
	if !all(l, true) || !all(s, true) {
		t.Errorf("before anything is known: %v, %v", l, s)
	}
	for range 100 {
		l, s = round(false)
	}
	if !all(l, false) || !all(s, true) {
		t.Errorf("long ones never came back: %v, %v", l, s)
	}
	for range 400 {
		l, s = round(true)
	}
	if !all(l, true) || !all(s, true) {
		t.Errorf("long ones come back now: %v, %v", l, s)
	}
}

// What the kind does not decide.
func TestRules(t *testing.T) {
	p := policy(t, nil)
	r := prompt{request: 1, chunks: 40}
	for range 100 {
		r.request++
		r.store(p)
		r.demoted(p)
		other := prompt{request: r.request + 1000, chunks: 2}
		other.store(p)
		other.demoted(p)
		other.store(p)
	}
	r.request++
	r.store(p)
	for name, c := range map[string]struct {
		candidate abi.Candidate
		want      bool
	}{
		"new":                   {r.candidate(abi.KindNew, 0, 0), true},
		"a demotion":            {r.candidate(abi.KindDemotion, 1, 0), false},
		"a demotion with a hit": {r.candidate(abi.KindDemotion, 2, 1), true},
		"a stranger's demotion": {abi.Candidate{Kind: abi.KindDemotion, Key: 1 << 60}, true},
		"the first hit":         {r.candidate(abi.KindPromotion, 3, 1), false},
		"the second hit":        {r.candidate(abi.KindPromotion, 3, 2), true},
		"with room":             {abi.Candidate{Kind: abi.KindPromotion, From: 1, Key: 1 << 60, Hits: 1, Flags: abi.CandidateRoom}, true},
		"one that a peer has":   {abi.Candidate{Kind: abi.KindDemotion, Key: 1 << 60, Hits: 3, Copies: 1}, false},
		"to a peer":             {r.candidateTo(abi.PeerLevel, 4), true},
		"from a peer":           {abi.Candidate{Kind: abi.KindPromotion, From: abi.PeerLevel, Key: 1 << 60, Hits: 3, Flags: abi.CandidateLast}, false},
		"from a peer to memory": {abi.Candidate{Kind: abi.KindPromotion, From: abi.PeerLevel, Key: 1 << 60, Hits: 3}, true},
		"a peer's offer":        {abi.Candidate{Kind: abi.KindDemotion, From: abi.PeerLevel, Key: 1 << 60, Copies: 2}, false},
		"an unknown kind":       {abi.Candidate{Kind: 9, Key: 5, Hits: 5}, false},
		"written through":       {abi.Candidate{Kind: abi.KindNew, Key: r.key(1), To: 1}, true},
		"of no request":         {abi.Candidate{Kind: abi.KindNew, From: abi.NoLevel, Key: 7}, true},
		"its demotion":          {abi.Candidate{Kind: abi.KindDemotion, Key: 7}, true},
	} {
		if got := ask(p, c.candidate); got != c.want {
			t.Errorf("%s: admitted %v, want %v", name, got, c.want)
		}
	}
}

// after is a policy that has learned that what long prompts add does not come back, and that short ones do.
func after(t *testing.T) (p *Policy, next uint32) {
	p = policy(t, nil)
	for next = 1; next < 300; next += 2 {
		long, short := prompt{request: next, chunks: 40}, prompt{request: next + 1, first: 3, chunks: 4}
		long.store(p)
		short.store(p)
		long.demoted(p)
		short.demoted(p)
		for i := range short.chunks {
			ask(p, short.candidate(abi.KindPromotion, i, 1))
		}
	}
	return p, next
}

// What was refused and comes back all the same is demoted from then on, although its kind still does not come back. It is
// not what a request adds: the two chunks behind it are of a short one.
func TestReturns(t *testing.T) {
	p, next := after(t)
	long := prompt{request: next, chunks: 40}
	long.store(p)
	if !all(long.demoted(p), false) {
		t.Fatal("what long prompts add is demoted")
	}
	for i := range uint32(42) { // the same prompt and a little more
		c := long.candidate(abi.KindNew, i, 0)
		c.Request = next + 1
		ask(p, c)
	}
	if !all(long.demoted(p), true) {
		t.Error("it was refused again after it had come back")
	}
	if c := long.candidate(abi.KindDemotion, 40, 0); !ask(p, c) {
		t.Error("one of two chunks that the request added is taken for one of 42")
	}
}

// What finds no room in its level is judged by the next one: an end that does not come back is refused, and what others
// continue is not.
func TestGoesAround(t *testing.T) {
	p, next := after(t)
	long := prompt{request: next, chunks: 40}
	for i := range long.chunks {
		c := long.candidate(abi.KindNew, i, 0)
		if !ask(p, c) {
			t.Fatalf("chunk %d is refused by the nearest level", i)
		}
		c.To = 1
		if i+1 < long.chunks {
			c.Flags |= abi.CandidateContinued
		}
		if got := ask(p, c); got != (i+1 < long.chunks) {
			t.Errorf("chunk %d of %d goes around: %v", i, long.chunks, got)
		}
	}
	if !ask(p, abi.Candidate{Kind: abi.KindNew, From: abi.NoLevel, To: 1, Key: 1 << 60}) {
		t.Error("a stranger is refused")
	}
}

// A chunk whose prefix was refused is of no use, unless the prefix is there by now.
func TestPrefixOfWhatIsRefused(t *testing.T) {
	p := policy(t, nil)
	r := prompt{request: 1, chunks: 2}
	r.store(p)
	p.at(r.key(0)).state = refused
	c := r.candidate(abi.KindDemotion, 1, 0)
	if ask(p, c) {
		t.Error("demoted after its prefix was refused")
	}
	c.Flags = abi.CandidateParentResident
	if !ask(p, c) {
		t.Error("refused, though its prefix is there")
	}
}

func TestSettings(t *testing.T) {
	for _, c := range []guest.Config{
		{"keys": "0"}, {"keys": "4194305"}, {"keys": "x"}, {"least": "-1"}, {"least": "1001"}, {"least": "x"},
	} {
		if _, err := New(guest.Info{Config: c}); err == nil {
			t.Errorf("the settings %v were taken", c)
		}
	}
	if n := len(policy(t, guest.Config{"keys": "1000"}).chunks); n != 1024 {
		t.Errorf("%d chunks", n)
	}
	one := policy(t, guest.Config{"keys": "1"})
	if !ask(one, abi.Candidate{Key: 9}) || !all(prompt{request: 3, chunks: 3}.demoted(one), true) {
		t.Error("with a single key")
	}
}

func TestAllocatesNothing(t *testing.T) {
	p := policy(t, nil)
	batch, dst := make([]abi.Candidate, 64), make([]bool, 64)
	n := uint32(0)
	got := testing.AllocsPerRun(2000, func() {
		for i := range batch {
			n++
			batch[i] = abi.Candidate{
				Kind: abi.CandidateKind(n % 3), Key: uint64(n % 700), Depth: n % 40, Request: n / 40, Hits: n % 5,
				From: uint8(n%3/2) - 1,
			}
		}
		p.Admit(batch, dst)
	})
	if got != 0 {
		t.Errorf("%g allocations in a batch", got)
	}
	if p.all.evicted == 0 || p.all.evicted >= most {
		t.Errorf("%d chunks are counted", p.all.evicted)
	}
}

// A request that goes on after what hardly anybody continued is of another kind than one that begins after a prefix that
// many share, and each kind is judged by itself.
func TestConversations(t *testing.T) {
	p := policy(t, nil)
	shared := uint64(1) << 50
	ask(p, abi.Candidate{Kind: abi.KindNew, From: abi.NoLevel, Key: shared, Request: 1})
	turn := func(request uint32, after uint64, depth uint32) (first []bool, last uint64) {
		r := prompt{request: request, first: depth, chunks: 10}
		for i := range r.chunks {
			c := r.candidate(abi.KindNew, i, 0)
			if i == 0 {
				c.ParentKey = after
			}
			ask(p, c)
		}
		return r.demoted(p)[:9], r.key(8)
	}
	var begin, on []bool
	for request := uint32(2); request < 400; request += 2 {
		var last uint64
		begin, last = turn(request, shared, 10)
		for i := range uint32(10) { // it is loaded, and nobody comes back to what goes on with it
			ask(p, prompt{request: request}.candidate(abi.KindPromotion, i, 1))
		}
		on, _ = turn(request+1, last, 10)
	}
	if !all(begin, true) || !all(on, false) {
		t.Errorf("what begins a conversation: %v, what goes on: %v", begin, on)
	}
}

// Chunks of a set do not displace one that came after them.
func TestForgets(t *testing.T) {
	p := policy(t, guest.Config{"keys": "4"})
	for n := range uint32(8) {
		ask(p, abi.Candidate{Kind: abi.KindNew, From: abi.NoLevel, Key: uint64(n) + 1, Request: n + 1})
	}
	for n := range uint64(8) {
		if known := p.at(n+1).key == n+1; known != (n >= 4) {
			t.Errorf("chunk %d of 8 in a table for 4 is known: %v", n, known)
		}
	}
}
