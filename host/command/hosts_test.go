package command

import (
	"context"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/drive"
	"github.com/kvhost/kvhost/host/internal/payload"
	"github.com/kvhost/kvhost/host/internal/replay"
	"github.com/kvhost/kvhost/host/internal/testkit/hosttest"
	"github.com/kvhost/kvhost/host/internal/trace"
	"github.com/kvhost/kvhost/host/kv"
)

var (
	hostsNumber   = flag.Int("hosts.number", 3, "hosts of TestHosts and TestHostsFaults")
	hostsTrace    = flag.String("hosts.trace", "", "trace that they replay; empty: a made workload")
	hostsRequests = flag.Int("hosts.requests", 240, "requests of it")
	hostsShare    = flag.Float64("hosts.share", 0.4, "capacity of all hosts together, of all chunks of the requests")
	hostsApart    = flag.Bool("hosts.apart", false, "each host in a network namespace where the test may make some; otherwise on loopback")
	hostsLoss     = flag.Float64("hosts.loss", 0, "of the packets between namespaces, the part that is lost")
	hostsSeed     = flag.Uint64("hosts.seed", 1, "of the workload, and of the host that gets a request")
)

const (
	hostsWindow = 256 // chunks of one lookup
	hostsLayers = 4
	hostsPage   = 16 << 10
)

// TestHosts deals requests to hosts that lend each other, one after the other, at random and, where hosts are apart, such that a
// conversation stays with its host but for one move in ten, too. One host with the capacity of all gets the same requests. Every byte is compared.
func TestHosts(t *testing.T) {
	if !hostsAreApart(t) {
		t.Parallel() // it waits more than it works
	}
	tally := testenv.NewTally(t, "hosts")
	deals := []string{"random"}
	if *hostsApart {
		deals = append(deals, "sticky")
	}
	for _, deal := range deals {
		t.Run(deal, func(t *testing.T) {
			requests := workload(t)
			c := startCluster(t, requests)
			alone := newCluster(t, 1, c.capacity*int64(*hostsNumber), false)
			alone.start(alone.members[0])
			to := dealt(requests, deal, len(c.members))
			var ends sync.WaitGroup
			ends.Go(func() {
				for n, keys := range requests {
					if !alone.members[0].player.play(uint32(n+1), keys) {
						return
					}
				}
			})
			var copies copyCount
			stored := map[kv.Key]bool{}
			for n, keys := range requests {
				if stored[keys[0]] {
					c.awaitTold()
				}
				stored[keys[0]] = true
				if !c.members[to[n]].player.play(uint32(n+1), keys) {
					break
				}
				if n%(len(requests)/8) == len(requests)/8-1 && n > len(requests)/2 {
					copies.add(c)
				}
			}
			ends.Wait()
			all, one := playerCount{}, alone.members[0].player.count
			for _, m := range c.members {
				all.merge(&m.player.count)
			}
			tally.Add(all.keys+one.keys, 0, 1)
			mean, most := copies.mean()
			t.Logf("%d hosts, %d requests: hit ratio %.4f, one host of all capacity %.4f: %.3f of it; copies of a chunk %.3f (most %d); "+
				"%.3f of hits remote; %d bytes wrong, %d loads failed; bytes sent by each: %s",
				len(c.members), len(requests), all.ratio(), one.ratio(), all.ratio()/one.ratio(), mean, most,
				float64(all.remote)/float64(max(1, all.hits)), all.wrong+one.wrong, all.failed+one.failed, c.sent())
			t.Log(c.asked())
			t.Logf("lookups %s; loads %s; one host: lookups %s; loads %s", quantiles(all.lookups), quantiles(all.loads),
				quantiles(one.lookups), quantiles(one.loads))
			if all.wrong+one.wrong > 0 {
				t.Errorf("%d and %d wrong bytes, want none", all.wrong, one.wrong)
			}
			if all.remote == 0 || all.failed+one.failed > 0 {
				t.Errorf("%d hits of peers, %d loads failed, want some and none", all.remote, all.failed+one.failed)
			}
			if part := all.ratio() / one.ratio(); *hostsTrace == "" && part < 0.75 { // without peers it is 0.71
				t.Errorf("%.3f of the hits that one host of all capacity has, want 0.75", part)
			}
		})
	}
}

// awaitTold waits until all hosts have been told of all chunks. Requests that have a prefix in common come seconds after each other in a
// trace, and here at once.
func (c *cluster) awaitTold() {
	c.Helper()
	known := func() (list []string) {
		has := map[string]uint64{}
		for _, m := range c.members {
			has[m.addr] = c.status(m).GetRoots()[0].GetEntries()
		}
		for _, m := range c.members {
			for at, p := range c.peers(m) {
				if p.GetState() != "self" && p.GetEntries() != has[at] {
					list = append(list, fmt.Sprintf("%s knows %d of the %d entries of %s, which is %s", m.addr, p.GetEntries(), has[at], at, p.GetState()))
				}
			}
		}
		return list
	}
	until(c.T, "hosts that know what each has", func() bool { return len(known()) == 0 }, func() any { return strings.Join(known(), "\n") })
}

// startCluster starts the hosts.
func startCluster(t *testing.T, requests [][]kv.Key) *cluster {
	t.Helper()
	distinct := map[kv.Key]bool{}
	for _, keys := range requests {
		for _, k := range keys {
			distinct[k] = true
		}
	}
	entry, err := replay.Shape{Ranks: 1, ChunkBytes: hostsLayers * hostsPage, PageBytes: hostsPage, Layers: hostsLayers}.EntryBytes(t.Context(), nil, nil)
	testenv.OK(t, err)
	c := newCluster(t, *hostsNumber, int64(float64(len(distinct))**hostsShare/float64(*hostsNumber))*entry, hostsAreApart(t))
	for _, m := range c.members {
		c.start(m)
	}
	c.await(len(c.members) - 1)
	return c
}

// workload is the keys of each request.
func workload(t *testing.T) (requests [][]kv.Key) {
	t.Helper()
	if *hostsTrace == "" {
		return madeWorkload()
	}
	r, err := trace.Open(*hostsTrace)
	testenv.OK(t, err)
	defer r.Close()
	for len(requests) < *hostsRequests {
		var q trace.Request
		if err := r.Next(&q); err == io.EOF {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		requests = append(requests, drive.ChainKeys(nil, q.HashIDs))
	}
	return requests
}

// madeWorkload is conversations that begin with one of four prompts and grow by a few chunks with each request. Some are long over.
func madeWorkload() (requests [][]kv.Key) {
	random := rand.New(rand.NewPCG(*hostsSeed, 1))
	var talks [][]uint64
	for id := uint64(1 << 20); len(requests) < *hostsRequests; {
		if len(talks) < 8 || random.IntN(4) == 0 {
			ids := make([]uint64, 6)
			prompt := uint64(random.IntN(4)) << 8
			for i := range ids {
				ids[i] = prompt + uint64(i)
			}
			talks = append(talks, ids)
		}
		at := len(talks) - 1 - random.IntN(min(len(talks), 24))
		if len(talks[at]) > 24 {
			continue
		}
		for range 1 + random.IntN(6) {
			id++
			talks[at] = append(talks[at], id)
		}
		requests = append(requests, drive.ChainKeys(nil, talks[at]))
	}
	return requests
}

// dealt is the host of each request. A sticky one goes where its conversation went last: that of its longest prefix known.
func dealt(requests [][]kv.Key, deal string, hosts int) (to []int) {
	random := rand.New(rand.NewPCG(*hostsSeed, 2))
	last := map[kv.Key]int{}
	for _, keys := range requests {
		at := random.IntN(hosts)
		if moves := random.IntN(10) == 0; deal == "sticky" && !moves {
			// What many begin with says nothing of a conversation.
			for i := len(keys) - 1; i >= min(8, len(keys)/2); i-- {
				if h, ok := last[keys[i]]; ok {
					at = h
					break
				}
			}
		}
		for _, k := range keys {
			last[k] = at
		}
		to = append(to, at)
	}
	return to
}

// player is an engine's session that plays requests, one at a time.
type player struct {
	*testing.T
	*hosttest.Client
	content payload.Content
	planes  []kv.Plane
	number  uint32 // of the latest request, where they are not numbered
	next    uint32 // block
	count   playerCount
}

// playerCount is what a player has seen.
type playerCount struct {
	keys, hits, remote, failed int64 // chunks
	wrong                      int64 // bytes
	lookups, loads             []time.Duration
}

func (c *playerCount) ratio() float64 { return float64(c.hits) / float64(max(1, c.keys)) }

func (c *playerCount) merge(o *playerCount) {
	c.keys, c.hits, c.remote, c.failed, c.wrong = c.keys+o.keys, c.hits+o.hits, c.remote+o.remote, c.failed+o.failed, c.wrong+o.wrong
	c.lookups, c.loads = append(c.lookups, o.lookups...), append(c.loads, o.loads...)
}

func newPlayer(t *testing.T, socket string) *player {
	t.Helper()
	g := kv.Uniform(1, hostsLayers, 1, hostsPage)
	p := &player{T: t, Client: hosttest.Dial(t, hosttest.Hello(socket, g), hostsWindow+16, 0, 0), planes: g.Planes}
	var err error
	p.content, err = payload.Of(payload.U8)
	testenv.OK(t, err)
	return p
}

// play plays a request: it looks its keys up, loads what is there, compares it, and stores the rest. It is false after an error.
func (p *player) play(number uint32, keys []kv.Key) bool {
	ctx, hits := p.Context(), 0
	var rest []int
	p.count.keys += int64(len(keys))
	for hits < len(keys) {
		part := keys[hits:min(hits+hostsWindow, len(keys))]
		n, again, err := p.load(ctx, number, part)
		if err != nil {
			p.Errorf("request %d: %v", number, err)
			return false
		}
		for _, i := range again {
			rest = append(rest, hits+i)
		}
		if hits += n; n < len(part) {
			break
		}
	}
	for i := hits; i < len(keys); i++ {
		rest = append(rest, i)
	}
	for some := range slices.Chunk(rest, hostsWindow) {
		chunks := make([]client.StoreChunk, len(some))
		for n, i := range some {
			chunks[n] = client.StoreChunk{Key: keys[i], Depth: uint32(i), Blocks: p.block()}
			if i > 0 {
				chunks[n].Parent = keys[i-1]
			}
			for plane := range p.planes {
				p.content.Fill(p.Page(plane, int(chunks[n].Blocks[0])), payload.Seed(&keys[i], 0, p.planes[plane], 0))
			}
		}
		job, err := p.Store(ctx, number, 0, chunks)
		if err == nil {
			_, err = job.Published(ctx)
		}
		if err != nil {
			p.Errorf("request %d: store: %v", number, err)
			return false
		}
	}
	if err := p.EndRequest(ctx, number, client.Hints{}); err != nil {
		p.Errorf("request %d: %v", number, err)
		return false
	}
	return true
}

// block is the next of the session's blocks.
func (p *player) block() []uint32 {
	p.next = (p.next + 1) % (hostsWindow + 16)
	return []uint32{p.next}
}

// load loads what is found of keys, and says which of that has failed.
func (p *player) load(ctx context.Context, number uint32, keys []kv.Key) (hits int, again []int, err error) {
	start := time.Now()
	l, err := p.Lookup(ctx, client.LookupRequest{Request: number, Keys: keys})
	p.count.lookups = append(p.count.lookups, time.Since(start))
	if err != nil || l.Hits() == 0 {
		return 0, nil, err
	}
	hits = l.Hits()
	for _, in := range l.Levels() {
		if in.Level > 0 {
			p.count.remote += int64(in.Chunks)
		}
	}
	chunks := make([]client.LoadChunk, hits)
	for i := range chunks {
		chunks[i] = client.LoadChunk{Index: i, Blocks: p.block()}
		for plane := range p.planes {
			clear(p.Page(plane, int(chunks[i].Blocks[0])))
		}
	}
	start = time.Now()
	job, err := p.Load(ctx, l, chunks, client.LoadOptions{})
	if err != nil {
		return 0, nil, err
	}
	r, err := job.Wait(ctx)
	p.count.loads = append(p.count.loads, time.Since(start))
	if err != nil {
		return 0, nil, err
	}
	failed := make([]bool, hits)
	for _, f := range r.Failed {
		failed[f.Chunk] = true
	}
	for i := range chunks {
		for plane := range p.planes {
			page := p.Page(plane, int(chunks[i].Blocks[0]))
			if n := p.content.Mismatches(page, payload.Seed(&keys[i], 0, p.planes[plane], 0)); n > 0 && !(failed[i] && blank(page)) {
				p.count.wrong += n
			}
		}
		if failed[i] {
			again = append(again, i)
		}
	}
	p.count.failed += int64(len(again))
	p.count.hits += int64(hits - len(again))
	return hits, again, nil
}

// blank says that a page has what it had before its load.
func blank(page []byte) bool {
	return !slices.ContainsFunc(page, func(b byte) bool { return b != 0 })
}

// copyCount counts how many hosts have a chunk.
type copyCount struct{ chunks, copies, most int }

// add counts the pieces that are on the disks.
func (n *copyCount) add(c *cluster) {
	c.Helper()
	has := map[string]int{}
	for _, m := range c.members {
		for _, name := range pieces(c.T, m) {
			has[filepath.Base(name)]++
		}
	}
	n.chunks += len(has)
	for _, copies := range has {
		n.copies, n.most = n.copies+copies, max(n.most, copies)
	}
}

func (n *copyCount) mean() (mean float64, most int) {
	return float64(n.copies) / float64(max(1, n.chunks)), n.most
}

// pieces are the files of a member's root.
func pieces(t *testing.T, m *member) (names []string) {
	t.Helper()
	testenv.OK(t, filepath.WalkDir(m.root(), func(name string, e fs.DirEntry, err error) error {
		if err == nil && !e.IsDir() && strings.HasSuffix(name, ".kv") && !strings.Contains(name, "/.kvhost") {
			names = append(names, name)
		}
		return nil // what is evicted on the way
	}))
	return names
}

// sent is how many bytes the others have read from each member, in MB.
func (c *cluster) sent() string {
	sum := map[string]uint64{}
	for _, m := range c.members {
		for at, p := range c.peers(m) {
			sum[at] += p.GetBytes()
		}
	}
	var list []string
	for _, m := range c.members {
		list = append(list, fmt.Sprintf("%.1f", float64(sum[m.addr])/1e6))
	}
	return strings.Join(list, " ") + " MB"
}

// asked is what came of the messages about chunks, over all members.
func (c *cluster) asked() string {
	var asks, failures, keys, struck, offers, taken uint64
	for _, m := range c.members {
		for _, p := range c.peers(m) {
			asks, failures, keys, struck = asks+p.GetAsks(), failures+p.GetFailures(), keys+p.GetKeys(), struck+p.GetStruck()
			offers, taken = offers+p.GetOffers(), taken+p.GetTaken()
		}
	}
	return fmt.Sprintf("%d leases were asked for, %d without an answer in time; of %d keys %d were not lent; of %d offers %d were taken", asks, failures,
		keys, struck, offers, taken)
}

// quantiles are the median, the 99th percentile and the longest of times.
func quantiles(times []time.Duration) string {
	if len(times) == 0 {
		return "none"
	}
	return fmt.Sprintf("p50 %.2f p99 %.2f most %.2f ms (%d)", millis(times, 0.5), millis(times, 0.99), millis(times, 1), len(times))
}

func millis(times []time.Duration, q float64) float64 {
	slices.Sort(times)
	return float64(times[max(1, int(math.Ceil(q*float64(len(times)))))-1]) / 1e6
}

var (
	hostsPhase  = flag.Duration("hosts.phase", 500*time.Millisecond, "how long TestHostsFaults lasts with each fault, and without one before it")
	hostsRounds = flag.Int("hosts.rounds", 1, "how often it has each fault")
)

// TestHostsFaults has one of the hosts killed, paused, cut off, or with flipped bytes on its disk, while the others go on with requests for
// what it has, among others. No byte that is loaded is wrong, each lookup and load ends, and the host lends again when the fault is over.
// The times of the others are beside those of the same requests without the fault.
func TestHostsFaults(t *testing.T) {
	faults := []string{"killed", "paused"}
	if hostsAreApart(t) {
		faults = append(faults, "cut off") // loopback cannot be cut
	} else {
		t.Parallel() // it waits more than it works
	}
	tally := testenv.NewTally(t, "hosts-faults")
	f := &faulty{T: t, requests: workload(t)}
	f.cluster = startCluster(t, f.requests)
	f.phase("warm", 0, nil)
	for _, fault := range append(faults, "damaged") { // the last, as it is the one that the others blame their peer for
		f.sides = map[string]*playerCount{}
		for round := range *hostsRounds {
			f.phase("without", 1, nil)
			var end func()
			f.phase("with", 1, func() { end = f.begin(fault, round) })
			end()
			for _, m := range f.members[1:] {
				until(t, "host that lends again", func() bool { return f.peers(m)[f.members[0].addr].GetState() == "here" })
			}
			f.lendsAgain(fault, round)
			tally.Add(0, 1, 1)
		}
		f.report(fault, tally)
	}
}

// faulty is hosts of which the first has a fault.
type faulty struct {
	*testing.T
	*cluster
	requests [][]kv.Key
	phases   uint64
	sides    map[string]*playerCount // what others than the first have seen, by the phases' name
}

// phase plays requests at random on all hosts from one on, at the same time, for a while. amid is called when they are at work, if it
// is not nil.
func (f *faulty) phase(name string, from int, amid func()) {
	f.Helper()
	f.phases++
	var work sync.WaitGroup
	var played atomic.Int64
	over := make(chan struct{})
	for i, m := range f.members[from:] {
		random := rand.New(rand.NewPCG(*hostsSeed, f.phases<<8|uint64(i)))
		m.player.count = playerCount{}
		work.Go(func() {
			for {
				select {
				case <-over:
					return
				default:
				}
				if m.player.number++; !m.player.play(m.player.number, f.requests[random.IntN(len(f.requests))]) {
					return
				}
				played.Add(1)
			}
		})
	}
	if amid != nil {
		until(f.T, "request that is played", func() bool { return played.Load() >= 5 || f.Failed() })
		amid()
	}
	<-time.After(*hostsPhase)
	close(over)
	work.Wait()
	if f.sides == nil { // it is warm now
		return
	}
	if f.sides[name] == nil {
		f.sides[name] = &playerCount{}
	}
	for _, m := range f.members[1:] {
		f.sides[name].merge(&m.player.count)
	}
}

// begin begins a fault of the first host. end ends it, and starts the host again if it was killed.
func (f *faulty) begin(fault string, round int) (end func()) {
	victim := f.members[0]
	switch fault {
	case "killed":
		victim.stop(syscall.SIGKILL)
		return func() { f.start(victim) }
	case "paused":
		f.signal(victim, syscall.SIGSTOP)
		return func() { f.signal(victim, syscall.SIGCONT) }
	case "cut off":
		f.link(0, "down")
		return func() { f.link(0, "up") }
	}
	keys := own(0xdd, fault, round)
	victim.player.number++
	victim.player.play(victim.player.number, keys)
	for _, name := range pieces(f.T, victim) {
		file, err := os.OpenFile(name, os.O_RDWR, 0)
		if os.IsNotExist(err) {
			continue // evicted
		}
		testenv.OK(f.T, err)
		info, err := file.Stat()
		testenv.OK(f.T, err)
		at, b := info.Size()/2+int64(round), make([]byte, 1)
		_, err = file.ReadAt(b, at)
		testenv.OK(f.T, err)
		b[0] ^= 1
		_, err = file.WriteAt(b, at)
		testenv.OK(f.T, err)
		testenv.OK(f.T, file.Close())
	}
	return func() { // the requests of the phase may all have been lent by others
		reads := f.members[1].player
		until(f.T, "damage that is found", func() bool {
			if f.blamed() > 0 {
				return true
			}
			reads.number++
			_, _, err := reads.load(f.Context(), reads.number, keys)
			testenv.OK(f.T, err)
			return false
		})
	}
}

// own are the keys of a request that the first host alone stores, for one use.
func own(use byte, fault string, round int) (keys []kv.Key) {
	for n := range 8 {
		keys = append(keys, kv.Key{byte(n), byte(round), use, fault[0]})
	}
	return keys
}

// blamed is how many pieces of the first host the others have found wrong.
func (f *faulty) blamed() (n uint64) {
	for _, m := range f.members[1:] {
		n += f.peers(m)[f.members[0].addr].GetBlamed()
	}
	return n
}

// lent is what the others have read from the first host.
func (f *faulty) lent() (n uint64) {
	for _, m := range f.members[1:] {
		n += f.peers(m)[f.members[0].addr].GetBytes()
	}
	return n
}

// lendsAgain stores a request at the first host that no other has, and loads it from another.
func (f *faulty) lendsAgain(fault string, round int) {
	f.Helper()
	before, keys := f.lent(), own(0xee, fault, round)
	first, other := f.members[0], f.members[1]
	first.player.number++
	first.player.play(first.player.number, keys)
	until(f.T, "byte that the host lends again", func() bool {
		other.player.number++
		_, _, err := other.player.load(f.Context(), other.player.number, keys)
		testenv.OK(f.T, err)
		return f.lent() > before
	})
}

// report judges what the others have seen, and says how long it took.
func (f *faulty) report(fault string, tally *testenv.Tally) {
	f.Helper()
	for _, name := range []string{"without", "with"} {
		c := f.sides[name]
		tally.Add(c.keys, 0, 0)
		f.Logf("%s, %s: %d requests, hit ratio %.4f, %d of %d hits remote, %d loads failed, %d bytes wrong; lookups %s; loads %s", fault, name,
			len(c.lookups), c.ratio(), c.remote, c.hits, c.failed, c.wrong, quantiles(c.lookups), quantiles(c.loads))
	}
	with, without := f.sides["with"], f.sides["without"]
	f.Logf("%s: p99 of lookups %.2f times as long, of loads %.2f", fault, millis(with.lookups, 0.99)/millis(without.lookups, 0.99),
		millis(with.loads, 0.99)/millis(without.loads, 0.99))
	for name, c := range f.sides {
		if c.wrong > 0 {
			f.Errorf("%s, %s: %d wrong bytes, want none", fault, name, c.wrong)
		}
	}
	if without.failed > 0 {
		f.Errorf("%s: %d loads failed without a fault, want none", fault, without.failed)
	}
	for _, m := range f.members[1:] {
		for at, p := range f.peers(m) {
			if p.GetBlamed() > 0 && at != f.members[0].addr {
				f.Errorf("%s blames %s, which has no fault", m.addr, at)
			}
		}
	}
	blamed := f.blamed()
	if is := blamed > 0; is != (fault == "damaged") {
		f.Errorf("%d pieces of a host that was %s were wrong", blamed, fault)
	}
}
