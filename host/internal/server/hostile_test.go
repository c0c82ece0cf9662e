package server

import (
	"context"
	"errors"
	"flag"
	"math/rand/v2"
	"net"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/store"
)

var (
	hostileTime = flag.Duration("hostile.time", time.Second, "how long hostile clients of TestHostileClients go on")
	hostileSeed = flag.Uint64("hostile.seed", 0, "seed of TestHostileClients; 0: any")
)

// Tenants of the test. The hostile one has a quota, so that what the honest one stored stays.
const honestTenant, hostileTenant = 1, 9

// hostileSessions attack at a time.
const hostileSessions = 5

// Beside hostile clients on both sockets an honest one is served right and in bounded time. The memory stays within its
// budget, and nothing is left of sessions that have ended.
func TestHostileClients(t *testing.T) {
	seed := *hostileSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	const limit = 64 << 20
	r := newRig(t, func(c *Config, s *store.Config) {
		c.Memory, c.Limits.Sessions = memoryOf(t, limit, 16), 16
		c.MaxWait, c.LeaseTTL, c.SlowTimeout, c.Capacity = 50*time.Millisecond, time.Minute, time.Second, s.Roots[0].Capacity
		s.Quotas = []store.Quota{{First: hostileTenant, Last: hostileTenant, Share: 0.25}}
	})
	honest := r.dial(func(h *client.Hello) { h.Engine, h.Tenant = "honest", honestTenant })
	honest.save(0, 16)
	goroutines, files, memory := serving(), open(t), heap()
	ctx, stop := context.WithTimeout(t.Context(), *hostileTime)
	defer stop()
	var work sync.WaitGroup
	tally := testenv.NewTally(t, "clients")
	var messages, sessions atomic.Int64
	for i := range uint64(hostileSessions) {
		work.Go(func() {
			for n := uint64(0); ctx.Err() == nil; n++ {
				h := &hostile{t: t, rig: r, rng: rand.New(rand.NewPCG(seed, i<<32|n))}
				sent := int64(h.attack(ctx))
				messages.Add(sent)
				sessions.Add(1)
				tally.Add(sent, 0, 1)
			}
		})
	}
	rounds := 0
	for ; ctx.Err() == nil; rounds++ {
		if err := honest.round(rounds); err != nil {
			t.Fatalf("seed %d, after %d rounds: %v", seed, rounds, err)
		}
		if f := r.server.Budgets(1)[0]; f.Held > f.Limit {
			t.Fatalf("seed %d: %+v", seed, f)
		}
		if rounds%200 == 0 {
			if grown := heap() - memory; grown > limit {
				t.Fatalf("seed %d: %d MiB more are in use, the limit is %d", seed, grown>>20, limit>>20)
			}
		}
	}
	work.Wait()
	until(t, "hostile sessions are gone", func() bool {
		f := r.server.Budgets(1)[0]
		return r.server.Stats().Sessions == 1 && f.Held < 1<<20 && r.server.budgets.Room.Figures(0).Held == 0
	})
	until(t, "goroutines and descriptors of hostile sessions are gone", func() bool {
		return serving() <= goroutines && open(t) <= files
	})
	t.Logf("seed %d: %d hostile sessions sent %d messages; %d rounds of the honest one", seed, sessions.Load(), messages.Load(), rounds)
}

// serving counts goroutines, but for those that file systems keep for system calls to come.
func serving() (n int) {
	buf := make([]byte, 8<<20)
	for stack := range strings.SplitSeq(string(buf[:runtime.Stack(buf, true)]), "\n\n") {
		if !strings.Contains(stack, "staging.(*WatchedFS)") {
			n++
		}
	}
	return n
}

// round stores a chunk, finds what was stored before, and loads it to pages that held something else.
func (p *peer) round(n int) error {
	ctx := p.t.Context()
	k := n % 16
	p.fill(k, k)
	job, err := p.Store(ctx, 0, 0, []client.StoreChunk{chunkOf(k, k)})
	if err != nil {
		return err
	}
	if res, err := job.Published(ctx); err != nil || res.Chunks[0].Result != client.Resident {
		return errors.Join(err, res.Chunks[0].Err, errors.New("what was stored is not resident"))
	}
	l, err := p.Lookup(ctx, client.LookupRequest{Keys: keys(16)})
	if err != nil {
		return err
	}
	if l.Hits() != 16 {
		return errors.New("what was stored is gone")
	}
	place := 16 + k // another place than that it was stored from
	p.poison(place)
	load, err := p.Load(ctx, l, []client.LoadChunk{{Index: k, Blocks: blocks(place)}}, client.LoadOptions{})
	if err != nil {
		return err
	}
	if res, err := load.Wait(ctx); err != nil || len(res.Failed) > 0 {
		return errors.Join(err, errors.New("the load failed"))
	}
	if !p.holds(k, place) {
		return errors.New("wrong bytes")
	}
	return nil
}

// hostile is one session of a hostile client.
type hostile struct {
	t   *testing.T
	rig *rig
	rng *rand.Rand
}

// attack runs a session and returns how many messages it has sent.
func (h *hostile) attack(ctx context.Context) (sent int) {
	conn, err := grpc.NewClient("unix:"+h.rig.socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		h.t.Error(err)
		return 0
	}
	defer conn.Close()
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	st, err := proto.NewEngineServiceClient(conn).Session(ctx)
	if err != nil {
		return 0
	}
	hello := tenantHello("hostile", hostileTenant)
	hello.Id = 1
	g := &grammar{rng: h.rng, id: 1}
	if g.pick(20) == 0 { // no HELLO first
		hello = g.next()
	}
	if st.Send(hello) != nil {
		return 0
	}
	first, err := st.Recv()
	if err != nil {
		return 1
	}
	reading, reads := make(chan struct{}), g.pick(2)*100_000
	go func() { // it reads for a while, or not at all
		defer close(reading)
		for range reads {
			if _, err := st.Recv(); err != nil {
				return
			}
		}
	}()
	nonce := first.GetHello().GetNonce()
	for sent = 1; sent < 30+g.pick(400) && ctx.Err() == nil; sent++ {
		if sent == 1 || g.pick(12) == 0 {
			h.pass(nonce, g)
		}
		if sent == 1 {
			m := &proto.Register{}
			for pl := range planes {
				m.Regions = append(m.Regions, region(pl, g.tag))
			}
			g.id++
			if st.Send(&proto.SessionRequest{Id: g.id, Body: &proto.SessionRequest_Register{Register: m}}) != nil {
				break
			}
		}
		if st.Send(g.next()) != nil {
			break
		}
	}
	if g.pick(2) == 0 {
		_ = st.CloseSend()
	} else {
		stop()
	}
	if g.pick(2) == 0 {
		conn.Close()
	}
	stop()
	<-reading
	return sent
}

// pass sends a descriptor, or what a broken client would send in its place.
func (h *hostile) pass(nonce []byte, g *grammar) {
	g.tag++
	body := proto.AppendDescriptor(nil, nonce, g.tag)
	var files []*os.File
	for range []int{1, 1, 1, 1, 0, 2, 9}[g.pick(7)] {
		size, seals := int64(planes*arenaBlocks*pageBytes), unix.F_SEAL_SHRINK
		if g.pick(10) == 0 {
			size, seals = int64(g.pick(2)), g.pick(2)
		}
		f, err := memfdOf(size, seals)
		if err != nil {
			h.t.Error(err)
			return
		}
		defer f.Close()
		files = append(files, f)
	}
	switch g.pick(12) {
	case 0:
		body = body[:g.pick(len(body))]
	case 1:
		body[g.pick(len(body))] ^= 1
	case 2:
		c, err := net.Dial("unix", h.rig.socket+proto.DescriptorSuffix)
		if err == nil {
			defer c.Close() // it says nothing
		}
		return
	}
	if len(body) > 0 {
		_, _ = h.rig.pass(body, files...)
	}
}

// FuzzSequences gives a greeted session with registered pages a sequence of messages of the grammar: each is answered, or is
// a job that is completed, nothing panics, and all that it held is given back.
func FuzzSequences(f *testing.F) {
	for seed := range uint64(8) {
		rng := rand.New(rand.NewPCG(seed, 1))
		data := make([]byte, 400)
		for i := range data {
			data[i] = byte(rng.UintN(256))
		}
		f.Add(data)
	}
	b := &fakeStore{}
	server := fakeServer(f, Config{MaxWait: time.Millisecond}, b)
	storeKeys(f, server, 3)
	pages := make([]byte, planes*pageBytes*arenaBlocks)
	f.Fuzz(func(t *testing.T, data []byte) {
		s := newServer(server.cfg, b)
		fuzzed := newFuzzed(t, s, pages)
		g := &grammar{data: data, id: 1}
		for n := 0; n < 40 && !g.over(); n++ {
			fuzzed.say(t, g.next())
		}
		fuzzed.end(t)
	})
}
