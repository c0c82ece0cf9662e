package shared

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/staging"
)

var (
	modelSeed  = flag.Uint64("model.seed", 0, "replay the history of this seed only")
	modelTrace = flag.Int("model.trace", 150, "operations that are shown when it fails")
	modelSeeds = flag.Uint64("model.seeds", 0, "run so many seeds")
)

const (
	modelKeys     = 40
	modelCapacity = 100 * 4096
	modelLapse    = 10 * time.Second
	modelPoll     = time.Second
)

// node is a host of the model: a member, an index in memory, and clients.
type node struct {
	*Member
	m      *model
	h      *host
	w      *world
	fs     hostFS
	index  map[chunk.Key]*item
	ticket uint64
	seq    int
}

type item struct {
	bytes     int64
	leases    int
	writing   bool
	condemned bool
	learned   bool // while it was condemned
}

// grantable says that lookups hit.
func (i *item) grantable() bool { return i != nil && !i.condemned && i.bytes > 0 }

func modelKey(n int) (k chunk.Key) {
	k[0], k[1] = byte(n), 1
	return k
}

func keyPath(k chunk.Key) string { return fmt.Sprintf("/r/p/%d", k[0]) }

func (n *node) at(k chunk.Key) *item {
	i := n.index[k]
	if i == nil {
		i = &item{}
		n.index[k] = i
	}
	return i
}

func (n *node) Learn(r *Record) {
	i := n.at(r.Key)
	i.learned = i.condemned
	if i.bytes == 0 {
		i.bytes = r.Bytes
	}
}

func (n *node) Touched([]uint64) {}

func (n *node) Condemn(v *Victim) bool {
	i := n.at(v.Key)
	if i.leases > 0 || i.writing {
		return false
	}
	i.condemned = true
	return true
}

func (n *node) Decide(v *Victim, removed bool) {
	i := n.at(v.Key)
	look := !removed || i.learned
	i.condemned, i.learned = false, false
	if !look {
		i.bytes = 0
	} else if info, err := n.fs.Stat(keyPath(v.Key)); err == nil {
		i.bytes = info.Allocated
	} else {
		i.bytes = 0
	}
	n.prune(v.Key)
}

func (n *node) prune(k chunk.Key) {
	if i := n.index[k]; i != nil && *i == (item{}) {
		delete(n.index, k)
	}
}

// Fenced keeps the index: the scan puts it right. Nobody counts on its leases any more.
func (n *node) Fenced() {
	for k, i := range n.index {
		i.leases = 0
		n.prune(k)
	}
}

func (n *node) Victims(bytes int64) (list []Victim) {
	for k := range modelKeys {
		k := modelKey((k*7 + int(n.w.now/time.Second)) % modelKeys)
		if i := n.index[k]; i.grantable() && i.leases == 0 && !i.writing && bytes > 0 {
			list = append(list, Victim{Key: k, Pieces: 1, Bytes: i.bytes})
			bytes -= i.bytes
		}
	}
	return list
}

func (n *node) Used() (sum int64) {
	for _, i := range n.index {
		sum += i.bytes
	}
	return sum
}

func (n *node) Paths(v *Victim) []string { return []string{keyPath(v.Key)} }

func (n *node) Identify(temp string, info staging.Info) (Record, error) {
	f, err := n.fs.OpenFile(temp, os.O_RDONLY, 0)
	if err != nil {
		return Record{}, err
	}
	b := make([]byte, info.Size)
	if _, err := f.ReadAt(b, 0); err != nil {
		return Record{}, err
	}
	var r Record
	err = json.Unmarshal(b, &r)
	r.Op = Published
	return r, err
}

// run is a host's life.
func (n *node) run() error {
	for {
		if err := n.Step(); err != nil {
			return err
		}
		if t := n.Ticket(); t != 0 && t != n.ticket {
			n.scan(t)
		}
		for range n.w.rng.IntN(8) {
			if err := n.client(); err != nil {
				return err
			}
		}
		n.h.sleep(modelPoll)
	}
}

// scan looks at everything, and drops what is not there.
func (n *node) scan(ticket uint64) {
	n.ticket = ticket
	list, err := n.fs.ReadDir("/r/p")
	if err != nil {
		return
	}
	seen := map[chunk.Key]bool{}
	for _, e := range list {
		var num int
		fmt.Sscan(e.Name(), &num)
		k := modelKey(num)
		seen[k] = true
		n.see(k)
	}
	for num := range modelKeys {
		if k := modelKey(num); !seen[k] && n.index[k] != nil {
			n.see(k) // published since, or gone
		}
	}
	n.Scanned(ticket)
}

func (n *node) see(k chunk.Key) {
	info, err := n.fs.Stat(keyPath(k))
	i := n.at(k)
	if err == nil {
		i.bytes = info.Allocated
	} else if !i.writing {
		i.bytes = 0
	}
	n.prune(k)
}

func (n *node) client() error {
	k := modelKey(n.w.rng.IntN(modelKeys))
	i := n.index[k]
	what := n.w.rng.IntN(4)
	if n.m.quiet {
		for k, i := range n.index {
			i.leases = 0
			n.prune(k)
		}
		return nil
	}
	switch what {
	case 0: // a lookup, and a load
		if n.Fresh() && i.grantable() {
			i.leases++
			n.w.note(n.h, "lease %d", k[0])
			_, err := n.fs.Stat(keyPath(k))
			if err != nil && n.listed() && n.active() {
				return fmt.Errorf("%s holds a lease on %d, and it is gone", n.h.id, k[0])
			}
		}
	case 1:
		if i != nil && i.leases > 0 {
			i.leases--
			n.prune(k)
		}
	default:
		if i == nil || i.bytes == 0 && !i.condemned && !i.writing {
			return n.put(k)
		}
	}
	return nil
}

// listed says that the others count on this host: it was not given up.
func (n *node) listed() bool { return n.w.dirs["/r/.kvhost/shared/hosts/"+n.name] }

func (n *node) put(k chunk.Key) error {
	bytes := int64(1+n.w.rng.IntN(3)) * 4096
	credit, ok := n.Take(bytes)
	if !ok {
		return nil
	}
	n.seq++
	temp, err := n.Temp(fmt.Sprintf("%d.%d", k[0], n.seq))
	if err != nil {
		n.Give(credit)
		return nil
	}
	i := n.at(k)
	i.writing = true
	defer func() { i.writing = false; n.prune(k) }()
	r := Record{Op: Published, Key: k, Bytes: bytes, Pieces: 1}
	err = n.write(temp, &r)
	if err == nil {
		err = n.Publish(temp, keyPath(k), r, &credit)
	}
	switch {
	case err == nil:
		i.bytes = bytes
		return nil
	case errors.Is(err, fs.ErrExist): // another host was first
		if info, err := n.fs.Stat(keyPath(k)); err == nil && i.bytes == 0 {
			i.bytes = info.Allocated
		}
	case !missing(err) && !errors.Is(err, ErrFenced):
		return err
	}
	if err := n.fs.Remove(temp); err == nil || missing(err) {
		n.Give(credit)
	}
	return nil
}

func (n *node) write(temp string, r *Record) error {
	f, err := n.fs.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	if err := f.Allocate(r.Bytes / 2); err != nil {
		return err
	}
	if err := f.Allocate(r.Bytes); err != nil {
		return err
	}
	_, err = f.WriteAt(b, 0)
	return err
}

// model is a world with nodes and what must hold at every instant.
type model struct {
	*world
	t     *testing.T
	nodes []*node
	lives int
	quiet bool // clients only release
}

func newModel(t *testing.T, seed uint64) *model {
	m := &model{world: newWorld(seed), t: t}
	m.dirs["/r/p"] = true
	m.check, m.after = m.leases, m.capacity
	return m
}

func (m *model) boot(id string) {
	m.lives++
	n := &node{m: m, w: m.world, index: map[chunk.Key]*item{}}
	boot := func(h *host) error {
		n.fs = hostFS{h, m.world}
		unique := uint64(m.lives) << 32
		var err error
		n.Member, err = New(Config{
			Dir: "/r", Host: id, Capacity: modelCapacity, Lapse: modelLapse, LogBytes: 2000, FS: n.fs,
			Unique: func() uint64 { unique++; return unique }, Now: func() time.Duration { return m.now },
		}, n)
		if err != nil {
			return err
		}
		return n.run()
	}
	m.nodes = append(m.nodes, n)
	n.h = m.start(id, boot)
}

// leases: nobody who is counted on holds a lease on what the evictor removes.
func (m *model) leases(h *host, op string, names ...string) error {
	if op != "rename" || !strings.HasPrefix(names[0], "/r/p/") || m.files[names[0]] == nil {
		return nil
	}
	if !m.dirs[names[1][:strings.LastIndex(names[1], "/")]] {
		return nil // the evictor was given up
	}
	for _, n := range m.nodes {
		if n.h.ended || n.Member == nil || !n.listed() {
			continue
		}
		for k, i := range n.index {
			if keyPath(k) == names[0] && i.leases > 0 {
				return fmt.Errorf("%s removes %s, which %s has leased", h.id, names[0], n.h.id)
			}
		}
	}
	return nil
}

// disk is the bytes of pieces, temporaries and trash.
func (m *model) disk() (sum int64) {
	seen := map[*inode]bool{}
	for _, n := range m.files {
		if !seen[n] {
			seen[n] = true
			sum += n.size
		}
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
	return slices.DeleteFunc(slices.Clone(m.nodes), func(n *node) bool { return n.h.ended })
}

// misfortune kills, stops or starts a host now and then.
func (m *model) misfortune() {
	list := m.live()
	switch r := m.rng.IntN(4000); {
	case r < 2 && len(list) > 1:
		n := list[m.rng.IntN(len(list))]
		m.note(n.h, "KILLED")
		n.h.kill()
	case r < 8:
		n := list[m.rng.IntN(len(list))]
		n.h.wake = m.now + time.Duration(m.rng.Int64N(int64(4*modelLapse)))
		m.note(n.h, "PAUSED until %s", n.h.wake)
	case r < 10 && len(list) < 4:
		for _, id := range []string{"a", "b", "c", "d"} {
			if !slices.ContainsFunc(list, func(n *node) bool { return n.h.id == id }) {
				m.boot(id)
				break
			}
		}
	}
}

func runModel(t *testing.T, seed uint64, steps int) (evictions, deaths, reigns uint64) {
	m := newModel(t, seed)
	fail := func(format string, args ...any) {
		t.Helper()
		t.Log(strings.Join(m.trace[max(0, len(m.trace)-*modelTrace):], "\n"))
		t.Fatalf("seed %d: "+format, append([]any{seed}, args...)...)
	}
	for _, id := range []string{"a", "b", "c"} {
		m.boot(id)
	}
	for range steps {
		m.misfortune()
		m.step()
		if m.fault != nil {
			fail("%v", m.fault)
		}
		for _, h := range m.hosts {
			if h.err != nil {
				fail("host %s: %v", h.id, h.err)
			}
		}
	}
	for _, n := range m.nodes {
		if n.Member != nil {
			s := n.Stats()
			evictions, deaths, reigns = evictions+s.Removed, deaths+s.Deaths, reigns+s.Reigns
		}
	}
	// Calm: what is left must find together.
	m.quiet = true
	for end := m.now + 12*modelLapse; m.now < end && m.fault == nil; {
		m.step()
	}
	if m.fault != nil {
		fail("%v", m.fault)
	}
	var evictors int
	for _, n := range m.live() {
		s := n.Stats()
		if s.State != Active {
			fail("%s is %s", n.h.id, s.State)
		}
		if s.Evictor {
			evictors++
			if used, disk := n.Used(), m.disk(); used != disk {
				fail("the evictor %s reckons with %d bytes, the disk has %d", n.h.id, used, disk)
			}
		}
		for k := range modelKeys {
			k := modelKey(k)
			f, i := m.files[keyPath(k)], n.index[k]
			if (f != nil) != i.grantable() || f != nil && f.size != i.bytes {
				fail("%s has %+v of %d, on disk: %t", n.h.id, i, k[0], f != nil)
			}
		}
	}
	if evictors != 1 {
		fail("%d evictors", evictors)
	}
	if gone := m.under("/r/.kvhost/shared/gone"); len(gone) != 0 {
		fail("members that are gone are left: %v", gone)
	}
	for _, dir := range m.under("/r/.kvhost/shared") {
		if dir[0] == 'x' || dir[0] == 'c' {
			fail("%s is left", dir)
		}
	}
	return evictions, deaths, reigns
}

// TestModel plays random histories of hosts that store, load, sleep and die between any two operations.
func TestModel(t *testing.T) {
	if *modelSeed != 0 {
		runModel(t, *modelSeed, 30_000)
		return
	}
	seeds := uint64(6)
	if *modelSeeds > 0 {
		seeds = *modelSeeds
	}
	var evictions, deaths, reigns uint64
	for seed := uint64(1); seed <= seeds; seed++ {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			e, d, r := runModel(t, seed, 30_000)
			evictions, deaths, reigns = evictions+e, deaths+d, reigns+r
		})
	}
	t.Logf("%d evictions, %d members given up, %d reigns", evictions, deaths, reigns)
	if evictions < 10*seeds || deaths < seeds || reigns < 2*seeds {
		t.Errorf("too little happened: %d evictions, %d members given up, %d reigns", evictions, deaths, reigns)
	}
}
