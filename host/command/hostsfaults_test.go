package command

import (
	"flag"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/kv"
)

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
	return func() {}
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
	before := f.lent()
	var keys []kv.Key
	for n := range 8 {
		keys = append(keys, kv.Key{byte(n), byte(round), 0xee, fault[0]})
	}
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
	if without.failed > 0 || without.remote == 0 {
		f.Errorf("%s: %d loads failed and %d hits were remote without a fault, want none and some", fault, without.failed, without.remote)
	}
	var blamed uint64
	for _, m := range f.members[1:] {
		s, err := proto.Status(f.Context(), filepath.Join(m.dir, "s"))
		testenv.OK(f.T, err)
		for _, p := range s.GetPeers() {
			if p.GetBlamed() > 0 && p.GetAddress() != f.members[0].addr {
				f.Errorf("%s blames %s, which has no fault", m.addr, p.GetAddress())
			}
			blamed += p.GetBlamed()
		}
	}
	if is := blamed > 0; is != (fault == "damaged") {
		f.Errorf("%d pieces of a host that was %s were wrong", blamed, fault)
	}
}
