package shared

import (
	"flag"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/testkit/scheduler"
	"github.com/kvhost/kvhost/host/kv"
)

var (
	modelSeed  = flag.Uint64("model.seed", 0, "replay the history of this seed only")
	modelTrace = flag.Int("model.Trace", 150, "operations that are shown when it fails")
	modelSeeds = flag.Uint64("model.seeds", 0, "run so many seeds")
	modelTime  = flag.Duration("model.time", 0, "continue with fresh seeds for so long")
)

const (
	modelKeys     = 70
	modelCapacity = 100 * 4096
	modelLapse    = 10 * time.Second
	modelPoll     = time.Second
	modelClients  = 3
	modelSteps    = 40_000
)

// model is a world with nodes and what must hold at every instant.
type model struct {
	*world
	t      *testing.T
	nodes  []*node
	lives  int
	steps  int64 // operations on files, each with all checks
	killed int64
	quiet  bool // clients only release
}

func newModel(t *testing.T, seed uint64) *model {
	m := &model{world: newWorld(seed), t: t}
	m.dirs["/r/p"] = true
	m.check, m.after = m.leases, m.capacity
	return m
}

func (m *model) boot(id string) {
	m.lives++
	n := &node{m: m, w: m.world, index: map[kv.Key]*item{}}
	boot := func(*scheduler.Thread) error {
		n.fs = hostFS{n, m.world}
		unique, origin := uint64(m.lives)<<32, time.Duration(m.lives%3)*400*24*time.Hour // no host's clock is another's
		var err error
		n.Member, err = New(Config{
			Dir: "/r", Host: id, Capacity: modelCapacity, Lapse: modelLapse, LogBytes: 2000, FS: n.fs,
			Unique: func() uint64 { unique++; return unique }, Now: func() time.Duration { return m.Now + origin + n.jumps },
		}, n)
		if err != nil {
			return err
		}
		for i := range modelClients {
			n.clients = append(n.clients, m.Start(fmt.Sprintf("%s%d", id, i+1), n, n.client))
		}
		return n.run()
	}
	m.nodes = append(m.nodes, n)
	n.h = m.Start(id, n, boot)
}

// leases: nobody who is counted on holds a lease on what the evictor removes.
func (m *model) leases(h *scheduler.Thread, op string, names ...string) error {
	if op != "rename" || !strings.HasPrefix(names[0], "/r/p/") || m.files[names[0]] == nil {
		return nil
	}
	if !m.dirs[names[1][:strings.LastIndex(names[1], "/")]] {
		return nil // the evictor was given up
	}
	for _, n := range m.nodes {
		if n.h.Ended || n.Member == nil || !n.listed() {
			continue
		}
		for k, i := range n.index {
			if keyPath(k) == names[0] && i.leases > 0 {
				return fmt.Errorf("%s removes %s, which %s has leased", h.ID, names[0], n.h.ID)
			}
		}
	}
	return nil
}

// disk is the bytes of pieces, temporaries and trash, and of files that are open and have no name any more, but for the
// one write to such a file that was under way.
func (m *model) disk() (sum int64) {
	seen := map[*inode]bool{}
	add := func(n *inode) {
		if !seen[n] && (n.links > 0 || n.late == 0) {
			sum += n.size
		}
		seen[n] = true
	}
	for _, n := range m.files {
		add(n)
	}
	for f := range m.open {
		add(f.inode)
	}
	return sum
}

func (m *model) capacity() error {
	if sum := m.disk(); sum > modelCapacity {
		return fmt.Errorf("%d bytes on disk, the capacity is %d", sum, modelCapacity)
	}
	return nil
}

// live are the nodes that run.
func (m *model) live() []*node {
	return slices.DeleteFunc(slices.Clone(m.nodes), func(n *node) bool { return n.h.Ended })
}

// misfortune kills, pauses or starts a host now and then, or has its clock jump, either way. A whole process is paused, or one thread before whatever
// operation is its next, while the others go on and may join again meanwhile.
func (m *model) misfortune() {
	list := m.live()
	switch r := m.Rng.IntN(8000); {
	case r < 2 && len(list) > 1:
		n := list[m.Rng.IntN(len(list))]
		m.Note(n.h, "KILLED")
		m.killed++
		m.kill(n)
	case r < 14:
		n := list[m.Rng.IntN(len(list))]
		threads := append(slices.Clone(n.clients), n.h)
		until := m.Now + time.Duration(m.Rng.Int64N(int64(4*modelLapse)))
		if r < 8 {
			m.Note(n.h, "PAUSED until %s", until)
		} else {
			amid := slices.DeleteFunc(slices.Clone(threads), func(h *scheduler.Thread) bool { return h.Wake > m.Now })
			if len(amid) > 0 { // of an operation
				threads = amid
			}
			threads = threads[m.Rng.IntN(len(threads)):][:1]
			m.Note(threads[0], "this thread PAUSED until %s", until)
			if m.Rng.IntN(3) > 0 && threads[0] != n.h { // until its host has been given up and, perhaps, has joined again
				n.h.Wake = max(n.h.Wake, m.Now+modelLapse+time.Duration(m.Rng.Int64N(int64(modelLapse/2))))
				until += n.h.Wake - m.Now
			}
		}
		for _, h := range threads {
			h.Wake = until
		}
	case r < 16 && len(list) < 4:
		for _, id := range []string{"a", "b", "c", "d"} {
			if !slices.ContainsFunc(list, func(n *node) bool { return n.h.ID == id }) {
				m.boot(id)
				break
			}
		}
	case r == 16:
		n := list[m.Rng.IntN(len(list))]
		n.jumps += time.Duration(m.Rng.Int64N(int64(8*modelLapse))) - 4*modelLapse
		m.Note(n.h, "its clock JUMPS: %s by now", n.jumps)
	}
}

func runModel(t *testing.T, seed uint64, steps int, faulty bool) (m *model, evictions, givenUp, reigns uint64) {
	m = newModel(t, seed)
	m.faulty = faulty
	defer func() { // the threads of those that live on would keep the world
		for _, n := range m.live() {
			m.kill(n)
		}
	}()
	fail := func(format string, args ...any) {
		t.Helper()
		t.Log(strings.Join(m.Trace[max(0, len(m.Trace)-*modelTrace):], "\n"))
		t.Fatalf("seed %d: "+format, append([]any{seed}, args...)...)
	}
	for _, id := range []string{"a", "b", "c"} {
		m.boot(id)
	}
	step := func() {
		m.Step()
		m.steps++
		if m.fault != nil {
			fail("%v", m.fault)
		}
		for _, h := range m.Threads {
			if h.Err != nil {
				fail("host %s: %v", h.ID, h.Err)
			}
		}
	}
	for range steps {
		m.misfortune()
		step()
	}
	for _, n := range m.nodes {
		if n.Member != nil {
			s := n.Stats()
			evictions, givenUp, reigns = evictions+s.Removed, givenUp+s.GivenUp, reigns+s.Terms
		}
	}
	// Calm: what is left must find together.
	m.quiet, m.faulty = true, false
	for end := m.Now + 12*modelLapse; m.Now < end; {
		step()
	}
	var evictors int
	var credit, outside int64
	for _, n := range m.live() {
		s := n.Stats()
		credit += s.Free
		if s.State != Active || s.Free < s.Want {
			fail("%s is in state %d, with credit for %d bytes, and wants %d", n.h.ID, s.State, s.Free, s.Want)
		}
		used := n.Used()
		for k := range modelKeys {
			k := modelKey(k)
			f, i := m.files[keyPath(k)], n.index[k]
			if f != nil && f.size == 0 { // it was damaged and emptied: who knew it counts it until a load meets it
				if i != nil {
					used -= i.bytes
				}
			} else if (f != nil) != i.grantable() || f != nil && f.size != i.bytes {
				fail("%s has %+v of %d, on disk: %t", n.h.ID, i, k[0], f != nil)
			}
		}
		if s.Evictor {
			evictors, outside = evictors+1, s.Outside
			if disk := m.disk(); used != disk || len(n.term.peers) != len(m.live()) {
				fail("the evictor %s reckons with %d bytes and %d hosts, there are %d and %d", n.h.ID, used, len(n.term.peers), disk,
					len(m.live()))
			}
		}
	}
	if evictors != 1 || outside != credit {
		fail("%d evictors, which count on %d bytes of credit, the hosts have %d", evictors, outside, credit)
	}
	if gone := m.under("/r/.kvhost/shared/gone"); len(gone) != 0 {
		fail("members that are gone are left: %v", gone)
	}
	for name := range m.files {
		if strings.Contains(name, "/t/") {
			fail("a temporary is left: %s", name)
		}
	}
	for _, dir := range m.under("/r/.kvhost/shared") {
		if dir[0] == 'x' || dir[0] == 'c' {
			fail("%s is left", dir)
		}
	}
	return m, evictions, givenUp, reigns
}

// TestASeedReplays plays a history twice: what a host does depends on the seed only, so a failure can be replayed.
func TestASeedReplays(t *testing.T) {
	testenv.Slow(t)
	first, count := max(1, *modelSeed), max(3, *modelSeeds)
	for seed := first; seed < first+count; seed++ {
		var sums [2]uint64
		for i := range sums {
			m, _, _, _ := runModel(t, seed, modelSteps/4, seed%2 == 0)
			sums[i] = m.Sum
		}
		if sums[0] != sums[1] {
			t.Errorf("seed %d: two runs differ", seed)
		}
	}
}

// TestModel plays random histories of hosts that store, load, sleep and die between any two operations. In those of even
// seeds operations on files fail now and then.
func TestModel(t *testing.T) {
	testenv.Slow(t)
	if *modelSeed != 0 {
		runModel(t, *modelSeed, modelSteps, *modelSeed%2 == 0)
		return
	}
	tally := testenv.NewTally(t, "model")
	seeds := uint64(6)
	if *modelSeeds > 0 {
		seeds = *modelSeeds
	}
	var evictions, givenUp, reigns uint64
	run := func(seed uint64) bool {
		return t.Run(fmt.Sprint(seed), func(t *testing.T) {
			m, e, d, r := runModel(t, seed, modelSteps, seed%2 == 0)
			evictions, givenUp, reigns = evictions+e, givenUp+d, reigns+r
			tally.Add(m.steps, m.killed, 1)
		})
	}
	for seed := uint64(1); seed <= seeds; seed++ {
		run(seed)
	}
	testenv.FreshSeeds(*modelTime, func(seed uint64) bool {
		ok := run(seed)
		if ok {
			seeds++
		}
		return ok
	})
	t.Logf("%d evictions, %d members given up, %d reigns", evictions, givenUp, reigns)
	if evictions < 10*seeds || givenUp < seeds || reigns < 2*seeds {
		t.Errorf("too little happened: %d evictions, %d members given up, %d reigns", evictions, givenUp, reigns)
	}
}
