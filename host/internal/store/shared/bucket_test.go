package shared

import (
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/testkit/scheduler"
)

// onBucket is three hosts of a bucket.
type onBucket struct {
	*model
	b *objects
	t *testing.T
}

func newOnBucket(t *testing.T, seed uint64) onBucket {
	m := media[1].make(seed, false)
	for _, id := range []string{"a", "b", "c"} {
		m.boot(id)
	}
	return onBucket{m, m.place.(*objects), t}
}

// run lets the hosts go on for a while.
func (m onBucket) run(d time.Duration) { m.model.run(m.t.Fatalf, d) }

func (m onBucket) end() {
	for _, n := range m.nodes {
		m.kill(n)
	}
}

// TestTheServerIsAway for longer than a lapse: no host gives another one up for that, whichever is the first to see it return, and all go on
// as they were.
func TestTheServerIsAway(t *testing.T) {
	for seed := range uint64(8) {
		m := newOnBucket(t, seed)
		m.run(6 * modelLapse)
		for last := ""; !strings.Contains(last, "put evictor: <nil>"); last = m.Trace[len(m.Trace)-1] { // it has seen all heartbeats
			m.Step()
		}
		names := m.b.names(Dir + "/hosts")
		m.b.away = true
		m.run(3 * modelLapse)
		for _, n := range m.nodes {
			if n.Fresh() {
				t.Errorf("seed %d: %s grants and stores without the server", seed, n.name)
			}
		}
		m.b.away = false
		m.run(2 * modelLapse)
		for _, n := range m.nodes {
			if s := n.Stats(); !n.Fresh() || s.State != Active || s.GivenUp > 0 {
				t.Errorf("seed %d: %s after the server's return: %+v, want active, and no host given up", seed, n.name, s)
			}
		}
		if now := m.b.names(Dir + "/hosts"); len(names) != 3 || !slices.Equal(now, names) {
			t.Errorf("seed %d: members %v, were %v; want the same three", seed, now, names)
		}
		for _, n := range m.nodes {
			m.Kill(n)
		}
	}
}

// TestABatchIsRemoved behind the hosts' backs, as by an evictor that was deposed: what comes after it is evicted nevertheless.
func TestABatchIsRemoved(t *testing.T) {
	m := newOnBucket(t, 2)
	defer m.end()
	m.run(6 * modelLapse)
	acts, batch := m.b.after, ""
	m.b.after = func(t *scheduler.Thread, verb, name string) error {
		if err := acts(t, verb, name); err != nil {
			return err
		}
		if verb == "put" && strings.HasPrefix(name, "batch/") {
			batch = name
		} else if verb == "get" && name == batch { // One host has read it.
			delete(m.b.objects, Dir+"/"+name)
			m.b.after = acts
		}
		return nil
	}
	m.run(6 * modelLapse)
	removed := func() (sum uint64) {
		for _, n := range m.nodes {
			sum += n.Stats().Removed
		}
		return sum
	}
	before := removed()
	if m.run(2 * modelLapse); removed() == before {
		t.Errorf("nothing was evicted after %d entries", before)
	}
}

// TestAHostThatReadsNoLogs cannot acknowledge, so it is given up although it can write.
func TestAHostThatReadsNoLogs(t *testing.T) {
	m := newOnBucket(t, 2)
	defer m.end()
	m.run(6 * modelLapse)
	other := m.nodes[slices.IndexFunc(m.nodes, func(n *node) bool { return n.term == nil })]
	m.b.broken = func(t *scheduler.Thread, verb, name string) bool {
		return t.Process == other && verb == "get" && strings.HasPrefix(name, "log/")
	}
	m.run(6 * modelLapse)
	var givenUp uint64
	for _, n := range m.nodes {
		givenUp += n.Stats().GivenUp
	}
	if givenUp == 0 {
		t.Error("no host was given up, and what the others want to evict waits for it")
	}
}

// TestTheEvictorsObjectIsRemoved behind the hosts' backs, with all that was granted: they join again, and the capacity holds.
func TestTheEvictorsObjectIsRemoved(t *testing.T) {
	m := newOnBucket(t, 2)
	m.run(10 * modelLapse)
	before := m.b.names(Dir + "/hosts")
	delete(m.b.objects, Dir+"/evictor")
	clear(m.b.owners)
	m.run(10 * modelLapse)
	for _, name := range m.b.names(Dir + "/hosts") {
		if slices.Contains(before, name) {
			t.Errorf("%s goes on with credit that no evictor knows", name)
		}
	}
	for _, n := range m.nodes {
		if s := n.Stats(); s.State != Active || s.Granted == 0 {
			t.Errorf("%s: %+v, want active, with credit", n.name, s)
		}
		m.Kill(n)
	}
}

// TestDamagedObjects: an object that nobody can read, or that says what no host says, does not end the work of the others.
func TestDamagedObjects(t *testing.T) {
	says := func(v any) []byte {
		b, err := EncodeControl(v)
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
		{"a log without an end", "/hosts/junk.1", says(&objectStatus{written{Log: math.MaxUint64}, status{Beat: 9}})},
		{"a claim", "/hosts/junk.1", says(&objectStatus{status: status{Beat: 9, claim: claim{Held: math.MaxInt64}}})},
		{"an end", "/evictor", says(&evictor{Term: 9, Owner: "b.200000001", Grants: map[string]*grant{"a.100000001": {End: math.MaxUint64}}})},
		{"a grant to a host", "/evictor", says(&evictor{Term: 9, Owner: "b.200000001", Grants: map[string]*grant{"a.100000001": {Granted: math.MaxInt64}}})},
		{"a grant to none", "/evictor", says(&evictor{Term: 9, Owner: "b.200000001", Grants: map[string]*grant{"junk.1": {Granted: math.MaxInt64}, "junk.2": {Granted: math.MaxInt64}}})},
		{"the last term", "/evictor", says(&evictor{Term: math.MaxUint64, Owner: "junk.1"})},
		{"a batch", "/batch/junk", []byte("junk")},
		{"a number of a log", "/log/a.100000001/18446744073709551615", []byte("junk")},
	} {
		t.Run(c.what, func(t *testing.T) {
			m := newOnBucket(t, 2)
			m.run(10 * modelLapse)
			if m.b.set(Dir+c.name, &object{data: c.data}); c.name == "/evictor" {
				clear(m.b.owners)
			}
			m.run(10 * modelLapse)
			before, acts := m.b.evictorNow(), m.steps
			m.run(2 * modelLapse)
			if now := m.b.evictorNow(); now.Beat == before.Beat {
				t.Error("no evictor is at work")
			}
			if per := (m.steps - acts) / int64(2*modelLapse/modelPoll); per > 1000 {
				t.Errorf("%d halves of requests in each round of three hosts", per)
			}
			if hosts := m.b.names(Dir + "/hosts"); len(hosts) != 3 {
				t.Errorf("members %v, want three", hosts)
			}
			for _, n := range m.nodes {
				if s := n.Stats(); s.State != Active || s.Granted == 0 {
					t.Errorf("%s: %+v, want active, with credit", n.name, s)
				}
			}
			for _, n := range m.live() {
				if c.what == "a batch" && n.term != nil || c.what != "a batch" && n.cfg.Host == "a" {
					m.Kill(n)
					break
				}
			}
			m.run(5 * modelLapse)
			if hosts := m.b.names(Dir + "/hosts"); len(hosts) != 2 {
				t.Errorf("members %v, want two without the one that was killed", hosts)
			}
			for _, n := range m.live() {
				if n.term != nil && !n.medium.(*bucket).cleaned {
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

func (e elected) Get(string, string, int64) ([]byte, string, error) {
	b, err := EncodeControl(&evictor{Term: 3, Owner: e.host, Beat: 9})
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
	b := m.medium.(*bucket)
	m.name, m.lastStep = "a.1", now
	if err := b.readEvictor(now); err != nil || m.term == nil {
		t.Fatalf("error %v, term %v; want that of the object", err, m.term)
	}
	if m.term.until > now {
		t.Error("it acts as the evictor before it has written")
	}
	if b.wrote(now); m.term.until <= now {
		t.Error("it does not act when it has written")
	}
}

// room is a root with bytes in use. It notes how many an evictor wants to free.
type room struct {
	Backend
	used, freed int64
}

func (r *room) Used() int64 { return r.used }

func (r *room) Victims(bytes int64) []Victim {
	r.freed += bytes
	return nil
}

// TestAnHeir: of the credit of a member that was gone before, an heir reserves what was not spent, as the evictor before it knew, and no
// more than there is free. It evicts for that only if a member wants room, and tells the next heir what it knows.
func TestAnHeir(t *testing.T) {
	for _, c := range []struct {
		name                                  string
		spent, returned, want, outside, freed int64
	}{
		{"nearly all is spent", 490, 0, 0, 10, 0},
		{"nearly all is spent, and the rest is enough", 490, 0, 5, 15, 0},
		{"nothing is known", 0, 0, 0, 20, 0},
		{"nothing is known, and a member wants room", 0, 0, 5, 20, 15},
		{"this host knows more", 490, 495, 0, 5, 0},
	} {
		r := &room{used: 80}
		m, err := New(Config{Objects: elected{}, Host: "a", Capacity: 100, Lapse: modelLapse, Unique: func() uint64 { return 1 },
			Now: func() time.Duration { return time.Hour }}, r)
		testenv.OK(t, err)
		m.name, m.admitted, m.peers, m.docket.back = "a.1", true, map[string]*peer{}, r
		m.peer("a.1").Want, m.peer("b.1").Returned = c.want, c.returned
		b := m.medium.(*bucket)
		b.readings = map[string]*reading{}
		b.evictor = &evictor{Term: 3, Owner: "a.1", Grants: map[string]*grant{"a.1": {}, "b.1": {Granted: 500, Spent: c.spent, End: 7}}}
		b.begin()
		m.term.knows = true
		testenv.OK(t, m.term.balance())
		if m.term.outside != c.outside || r.freed != c.freed {
			t.Errorf("%s: %d bytes are reserved, and %d freed; want %d and %d", c.name, m.term.outside, r.freed, c.outside, c.freed)
		}
		if got, want := b.record("a.1").Grants["b.1"].Spent, max(c.spent, c.returned); got != want {
			t.Errorf("%s: the next heir reads that %d are spent, want %d", c.name, got, want)
		}
	}
}
