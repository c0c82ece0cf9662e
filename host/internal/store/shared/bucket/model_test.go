package bucket

import (
	"flag"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/store/shared"
	"github.com/kvhost/kvhost/host/internal/testkit/scheduler"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

var (
	modelSeed  = flag.Uint64("model.seed", 0, "replay the history of this seed only")
	modelTrace = flag.Int("model.Trace", 150, "requests that are shown when it fails")
	modelSeeds = flag.Uint64("model.seeds", 0, "run so many seeds")
)

const (
	modelKeys     = 70
	modelCapacity = 100 * 4096
	modelLapse    = 10 * time.Second
	modelPoll     = time.Second
	modelClients  = 3
	modelSteps    = 60_000
)

// model is a world with nodes and what must hold at every instant.
type model struct {
	*world
	nodes  []*node
	lives  uint64
	ids    uint64
	killed int64
	late   int64             // objects that were stored late
	owners map[uint64]string // by term
	most   int64
	quiet  bool // clients only release
}

func newModel(seed uint64) *model {
	m := &model{world: newWorld(seed), owners: map[uint64]string{}}
	m.after = m.holds
	for _, id := range []string{"a", "b", "c"} {
		m.boot(id)
	}
	return m
}

// run lets hosts that fare well go on for a while.
func (m *model) run(t *testing.T, d time.Duration) {
	t.Helper()
	for end := m.Now + d; m.Now < end; {
		if m.Step(); m.fault != nil {
			t.Fatal(m.fault)
		}
	}
}

func (m *model) boot(id string) {
	m.lives++
	unique, origin := m.lives<<32, time.Duration(m.lives%3)*400*24*time.Hour // no host's clock is another's
	n := &node{m: m, w: m.world, index: map[kv.Key]*item{}}
	n.fs = pieces{n: n, temps: map[string]staging.Info{}}
	var err error
	n.Member, err = New(Config{
		Objects: m.world, FS: n.fs, Host: id, Capacity: modelCapacity, Lapse: modelLapse, Workers: 1,
		Unique: func() uint64 { unique++; return unique }, Now: func() time.Duration { return m.Now + origin + n.jumps },
	}, n)
	if err != nil {
		panic(err)
	}
	m.nodes = append(m.nodes, n)
	n.steps = m.Start(id, n, n.run)
	for i := range modelClients {
		n.clients = append(n.clients, m.Start(fmt.Sprintf("%s%d", id, i+1), n, n.client))
	}
}

func (m *model) live() []*node {
	return slices.DeleteFunc(slices.Clone(m.nodes), func(n *node) bool { return n.steps.Ended })
}

// evictor is the evictor's object.
func (m *model) evictorNow() (o evictor) {
	if have := m.objects[shared.Dir+"/evictor"]; have != nil {
		_ = shared.DecodeControl(have.data, &o)
	}
	return o
}

// holds is what must hold after each request that the server has carried out.
func (m *model) holds(t *scheduler.Thread, verb, name string) error {
	switch verb {
	case "put":
		if o := m.evictorNow(); name == "evictor" && o.Owner != "" {
			if was := m.owners[o.Term]; was != "" && was != o.Owner {
				return fmt.Errorf("term %d is of %s and of %s", o.Term, was, o.Owner)
			}
			m.owners[o.Term] = o.Owner
		}
	case "store":
		var sum int64
		for key, o := range m.objects {
			if isPiece(key) && !o.late {
				sum += o.bytes
			} else if isPiece(key) {
				m.late++
			}
		}
		if m.most = max(m.most, sum); sum > modelCapacity {
			return fmt.Errorf("%d bytes in the bucket besides those that came late, the capacity is %d", sum, modelCapacity)
		}
		o := m.evictorNow()
		var credit int64
		for _, n := range m.live() {
			if s := o.Grants[n.name]; s != nil && s.End == 0 {
				credit += n.Stats().Free
			}
		}
		for _, n := range m.live() {
			if n.name == o.Owner && n.term != nil && n.term.knows && n.active() && n.Used()+n.term.outside < sum+credit {
				return fmt.Errorf("%d bytes in the bucket, and credit for %d; the evictor %s reckons with %d, and %d that were granted", sum,
					credit, n.name, n.Used(), n.term.outside)
			}
		}
	case "delete": // by the evictor, not by one that was given up
		o := m.evictorNow()
		if by := t.Process.(*node); o.Owner != by.name || by.term == nil {
			return nil
		}
		for _, n := range m.live() {
			if s := o.Grants[n.name]; s == nil || s.End > 0 || !n.admitted || m.objects[shared.Dir+"/hosts/"+n.name] == nil {
				continue
			}
			for k, i := range n.index {
				if keyPath(k) == name && i.leases > 0 {
					return fmt.Errorf("%s removes %s, which %s has leased", t.ID, name, n.name)
				}
			}
		}
	}
	return nil
}

// misfortune kills, pauses or starts a host now and then, or has its clock jump, either way. A whole process is paused, or one thread amid whatever request is its
// next, while the others go on and may join again.
func (m *model) misfortune() {
	list := m.live()
	switch r := m.Rng.IntN(12_000); {
	case r < 2 && len(list) > 1:
		n := list[m.Rng.IntN(len(list))]
		m.note("KILLS %s", n.name)
		m.killed++
		m.Kill(n)
	case r < 14:
		n := list[m.Rng.IntN(len(list))]
		threads := append(slices.Clone(n.clients), n.steps)
		until := m.Now + time.Duration(m.Rng.Int64N(int64(6*modelLapse)))
		if r >= 8 {
			threads = threads[m.Rng.IntN(len(threads)):][:1]
		}
		m.note("PAUSES %d threads of %s until %s", len(threads), n.name, until)
		for _, t := range threads {
			t.Wake = until
		}
	case r < 17 && len(list) < 4:
		for _, id := range []string{"a", "b", "c", "d"} {
			if !slices.ContainsFunc(list, func(n *node) bool { return n.cfg.Host == id }) {
				m.boot(id)
				break
			}
		}
	case r == 17:
		n := list[m.Rng.IntN(len(list))]
		n.jumps += time.Duration(m.Rng.Int64N(int64(8*modelLapse))) - 4*modelLapse
		m.note("has the clock of %s JUMP: %s by now", n.name, n.jumps)
	}
}

type figures struct{ evictions, givenUp, terms uint64 }

func runModel(t *testing.T, seed uint64, faulty bool) (m *model, f figures) {
	m = newModel(seed)
	m.faulty = faulty
	defer func() {
		for _, n := range m.live() {
			m.Kill(n)
		}
	}()
	fail := func(format string, args ...any) {
		t.Helper()
		t.Log(strings.Join(m.Trace[max(0, len(m.Trace)-*modelTrace):], "\n"))
		t.Fatalf("seed %d: "+format, append([]any{seed}, args...)...)
	}
	step := func() {
		m.Step()
		if m.fault != nil {
			fail("%v", m.fault)
		}
	}
	for range modelSteps {
		m.misfortune()
		step()
	}
	for _, n := range m.nodes {
		s := n.Stats()
		f.evictions, f.givenUp, f.terms = f.evictions+s.Removed, f.givenUp+s.GivenUp, f.terms+s.Terms
	}
	// Calm: what is left must find together, and an audit must find what came late.
	m.quiet, m.faulty = true, false
	for end := m.Now + auditEvery + 12*modelLapse; m.Now < end; {
		step()
	}
	var evictors int
	var credit, outside, sum int64
	for key, o := range m.objects {
		if isPiece(key) {
			sum += o.bytes
		}
	}
	for _, n := range m.live() {
		s := n.Stats()
		credit += s.Free
		if s.State != shared.Active || s.Free < s.Want {
			fail("%s is in state %d, with credit for %d bytes, and wants %d", n.name, s.State, s.Free, s.Want)
		}
		for k := range modelKeys {
			k := modelKey(k)
			if o, i := m.objects[keyPath(k)], n.index[k]; i.grantable() && (o == nil || o.bytes != i.bytes) {
				fail("%s has %+v of %d, in the bucket: %t", n.name, i, k[0], o != nil)
			}
		}
		if s.Evictor {
			evictors, outside = evictors+1, s.Outside
			if used := n.Used(); used != sum {
				fail("the evictor %s counts %d bytes, there are %d", n.name, used, sum)
			}
		}
	}
	if evictors != 1 || outside != credit {
		fail("%d evictors, which count on %d bytes of credit, the hosts have %d", evictors, outside, credit)
	}
	if sum > modelCapacity {
		fail("%d bytes are left in the bucket, the capacity is %d", sum, modelCapacity)
	}
	for name := range m.objects {
		rest, _ := strings.CutPrefix(name, shared.Dir+"/")
		member := strings.Split(rest, "/")
		if s := m.evictorNow().Grants; len(member) > 1 && !isPiece(name) && member[0] != "batch" && s[member[1]] == nil ||
			member[0] == "batch" {
			fail("left: %s", name)
		}
	}
	return m, f
}

// TestModel plays random histories of hosts that store, load, sleep and die amid any request. In those of even seeds requests fail,
// or have no answer.
func TestModel(t *testing.T) {
	testenv.Slow(t)
	if *modelSeed != 0 {
		runModel(t, *modelSeed, *modelSeed%2 == 0)
		return
	}
	tally := testenv.NewTally(t, "model-bucket")
	seeds := uint64(6)
	if *modelSeeds > 0 {
		seeds = *modelSeeds
	}
	var all figures
	late := int64(0)
	for seed := uint64(1); seed <= seeds; seed++ {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			m, f := runModel(t, seed, seed%2 == 0)
			all = figures{all.evictions + f.evictions, all.givenUp + f.givenUp, all.terms + f.terms}
			late += m.late
			tally.Add(m.acts, m.killed, 1)
		})
	}
	t.Logf("%d evictions, %d members given up, %d terms, %d stores that came late", all.evictions, all.givenUp, all.terms, late)
	if all.evictions < 10*seeds || all.givenUp < seeds || all.terms < 2*seeds {
		t.Errorf("too little happened: %+v", all)
	}
}

// TestTheServerIsAway for longer than a lapse: no host gives another one up for that, whichever is the first to see it return, and all go on
// as they were.
func TestTheServerIsAway(t *testing.T) {
	for seed := range uint64(8) {
		m := newModel(seed)
		m.run(t, 6*modelLapse)
		for last := ""; !strings.Contains(last, "put evictor: <nil>"); last = m.Trace[len(m.Trace)-1] { // it has seen all heartbeats
			m.Step()
		}
		names := m.names(shared.Dir + "/hosts")
		m.away = true
		m.run(t, 3*modelLapse)
		for _, n := range m.nodes {
			if n.Fresh() {
				t.Errorf("seed %d: %s grants and stores without the server", seed, n.name)
			}
		}
		m.away = false
		m.run(t, 2*modelLapse)
		for _, n := range m.nodes {
			if s := n.Stats(); !n.Fresh() || s.State != shared.Active || s.GivenUp > 0 {
				t.Errorf("seed %d: %s after the server's return: %+v, want active, and no host given up", seed, n.name, s)
			}
		}
		if now := m.names(shared.Dir + "/hosts"); len(names) != 3 || !slices.Equal(now, names) {
			t.Errorf("seed %d: members %v, were %v; want the same three", seed, now, names)
		}
		for _, n := range m.nodes {
			m.Kill(n)
		}
	}
}

// TestTheEvictorsObjectIsRemoved behind the hosts' backs, with all that was granted: they join again, and the capacity holds.
func TestTheEvictorsObjectIsRemoved(t *testing.T) {
	m := newModel(2)
	m.run(t, 10*modelLapse)
	before := m.names(shared.Dir + "/hosts")
	delete(m.objects, shared.Dir+"/evictor")
	clear(m.owners)
	m.run(t, 10*modelLapse)
	for _, name := range m.names(shared.Dir + "/hosts") {
		if slices.Contains(before, name) {
			t.Errorf("%s goes on with credit that no evictor knows", name)
		}
	}
	for _, n := range m.nodes {
		if s := n.Stats(); s.State != shared.Active || s.Granted == 0 {
			t.Errorf("%s: %+v, want active, with credit", n.name, s)
		}
		m.Kill(n)
	}
}

// TestDamagedObjects: an object that nobody can read, or that says what no host says, does not end the work of the others.
func TestDamagedObjects(t *testing.T) {
	testenv.Slow(t)
	says := func(v any) []byte {
		b, err := shared.EncodeControl(v)
		testenv.OK(t, err)
		return b
	}
	for _, c := range []struct {
		what, name string
		data       []byte
	}{
		{"a member", "/hosts/junk.1", []byte("junk")},
		{"a member that is one", "/hosts/a.100000001", []byte("junk")},
		{"the evictor", "/evictor", []byte("junk")},
		{"a log without an end", "/hosts/junk.1", says(&status{Beat: 9, Log: math.MaxUint64})},
		{"a claim", "/hosts/junk.1", says(&status{Beat: 9, Claim: shared.Claim{Held: math.MaxInt64}})},
		{"an end", "/evictor", says(&evictor{Term: 9, Owner: "b.200000001", Grants: map[string]*grant{"a.100000001": {End: math.MaxUint64}}})},
		{"the last term", "/evictor", says(&evictor{Term: math.MaxUint64, Owner: "junk.1"})},
		{"a batch", "/batch/junk", []byte("junk")},
		{"a number of a log", "/log/a.100000001/18446744073709551615", []byte("junk")},
	} {
		t.Run(c.what, func(t *testing.T) {
			m := newModel(2)
			m.run(t, 10*modelLapse)
			if m.set(shared.Dir+c.name, &object{data: c.data}); c.name == "/evictor" {
				clear(m.owners)
			}
			m.run(t, 10*modelLapse)
			before, acts := m.evictorNow(), m.acts
			m.run(t, 2*modelLapse)
			if now := m.evictorNow(); now.Beat == before.Beat {
				t.Error("no evictor is at work")
			}
			if per := (m.acts - acts) / int64(2*modelLapse/modelPoll); per > 500 {
				t.Errorf("%d requests in each round of three hosts", per)
			}
			if hosts := m.names(shared.Dir + "/hosts"); len(hosts) != 3 {
				t.Errorf("members %v, want three", hosts)
			}
			for _, n := range m.nodes {
				if s := n.Stats(); s.State != shared.Active || s.Granted == 0 {
					t.Errorf("%s: %+v, want active, with credit", n.name, s)
				}
			}
			for _, n := range m.live() {
				if c.what == "a batch" && n.term != nil || c.what != "a batch" && n.cfg.Host == "a" {
					m.Kill(n)
					break
				}
			}
			m.run(t, 5*modelLapse)
			if hosts := m.names(shared.Dir + "/hosts"); len(hosts) != 2 {
				t.Errorf("members %v, want two without the one that was killed", hosts)
			}
			for _, n := range m.live() {
				if n.term != nil && !n.term.cleaned {
					t.Errorf("%s does not come to an end with what others have left", n.name)
				}
				m.Kill(n)
			}
		})
	}
}

// elected are objects of which one is read: the evictor's, that a host has written.
type elected struct {
	Objects
	host string
}

func (e elected) Get(string, string) ([]byte, string, error) {
	b, err := shared.EncodeControl(&evictor{Term: 3, Owner: e.host, Beat: 9})
	return b, "version", err
}

// TestAnElectionWithoutAnAnswer: who finds out later that it was elected does not act until it has written the object again, since the others
// count from when it was written.
func TestAnElectionWithoutAnAnswer(t *testing.T) {
	now := time.Hour
	m, err := New(Config{Objects: elected{host: "a.1"}, Host: "a", Capacity: 1, Lapse: modelLapse, Unique: func() uint64 { return 1 },
		Now: func() time.Duration { return now }}, nil)
	if err != nil {
		t.Fatal(err)
	}
	m.name, m.lastStep = "a.1", now
	m.Beat(now)
	if err := m.readOffice(now); err != nil || m.term == nil {
		t.Fatalf("error %v, term %v; want that of the object", err, m.term)
	}
	if m.term.holds() {
		t.Error("it acts as the evictor before it has written")
	}
	m.term.wroteAt = now
	if !m.term.holds() {
		t.Error("it does not act when it has written")
	}
}
