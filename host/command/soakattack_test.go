package command

import (
	"context"
	endian "encoding/binary"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/kv"
)

// soakAttacker is set in the process whose clients attack a host: its socket and a seed.
const soakAttacker = "KVHOST_TEST_ATTACKER"

const (
	attackTime    = time.Second
	hostileTenant = 666
	hostileBlocks = 64
)

// startAttackers starts a process whose clients attack until it is killed. It has less of the processor than others: what a
// host does for attackers counts here, not that they share a machine with it.
func startAttackers(t *testing.T, socket string, seed uint64) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(os.Args[0], fmt.Sprintf("-soak.attackers=%d", *soakWidth))
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d %s", soakAttacker, seed, socket), "GOMAXPROCS=2")
	said := &strings.Builder{}
	cmd.Stdout, cmd.Stderr = said, said
	testenv.OK(t, cmd.Start())
	return cmd
}

// attack is the process of the attackers. It ends when it is killed.
func attack(who string) int {
	seed, socket, _ := strings.Cut(who, " ")
	n, err := strconv.ParseUint(seed, 10, 64)
	if err == nil {
		err = syscall.Setpriority(syscall.PRIO_PROCESS, 0, 19)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	flag.Parse()
	for i := range *soakWidth {
		go func() {
			a := &attacker{socket: socket, name: fmt.Sprintf("attacker-%d-%d", n, i), rng: rand.New(rand.NewPCG(n, uint64(i)))}
			for round := range 1 << 30 {
				which := (int(n)*3 + i + round**soakWidth) % len(attacks)
				ctx, cancel := context.WithTimeout(context.Background(), attackTime)
				began := time.Now()
				err := attacks[which](a, ctx)
				fmt.Printf("attack %d for %v: %v\n", which, time.Since(began), err) // hosts may refuse anything
				cancel()
			}
		}()
	}
	select {}
}

type attacker struct {
	socket, name string
	rng          *rand.Rand
	engines      int
}

// attacks are what clients do to a host, each until its context ends. TestHostileClients has those who break the protocol.
var attacks = []func(*attacker, context.Context) error{
	(*attacker).floodLookups, (*attacker).abandonLeases, (*attacker).floodStores, (*attacker).comeInCrowds,
	(*attacker).waitForWords, (*attacker).registerMuch, (*attacker).discardOthers,
}

func (a *attacker) namespace() kv.Namespace {
	return kv.Namespace{
		Model: "hostile/model", DType: "bf16", Engine: "soak", HashAlgorithm: "sha256", KeyBytes: 32, TokensPerBlock: 16,
		Groups: []kv.Group{{Geometry: kv.Uniform(1, 2, 2, 4096)}},
	}
}

// hello is another engine each time.
func (a *attacker) hello() client.Hello {
	a.engines++
	return client.Hello{Socket: a.socket, Engine: fmt.Sprintf("%s-%d", a.name, a.engines), Role: "worker", LocalRanks: 1,
		Namespace: a.namespace(), Tenant: hostileTenant}
}

func (a *attacker) keys(n int) []kv.Key {
	keys := make([]kv.Key, n)
	for i := range keys {
		endian.LittleEndian.PutUint64(keys[i][:], a.rng.Uint64N(4000)+1)
		keys[i][31] = 0xee
	}
	return keys
}

// session is a session with registered pages.
func (a *attacker) session(ctx context.Context) (*client.Session, *client.Arena, error) {
	s, err := client.Dial(ctx, a.hello())
	if err != nil {
		return nil, nil, err
	}
	arena, err := s.NewArena(4 * hostileBlocks * 4096)
	if err == nil {
		_, err = s.Register(ctx, 0, arena, a.planes())
	}
	if err != nil {
		s.Close()
		return nil, nil, err
	}
	return s, arena, nil
}

func (a *attacker) planes() (list []client.PlaneRegion) {
	for p := range int64(4) {
		list = append(list, client.PlaneRegion{Offset: p * hostileBlocks * 4096, Stride: 4096, Blocks: hostileBlocks})
	}
	return list
}

func (a *attacker) chunks(n int) []client.StoreChunk {
	list := make([]client.StoreChunk, n)
	for i, k := range a.keys(n) {
		list[i] = client.StoreChunk{Key: k, Blocks: []uint32{uint32(a.rng.IntN(hostileBlocks))}}
	}
	return list
}

// floodLookups asks from many goroutines for as many keys as fit.
func (a *attacker) floodLookups(ctx context.Context) error {
	s, err := client.Dial(ctx, a.hello())
	if err != nil {
		return err
	}
	defer s.Close()
	keys := a.keys(2000)
	var all sync.WaitGroup
	for range 16 {
		all.Go(func() {
			for err := error(nil); err == nil; {
				_, err = s.Lookup(ctx, client.LookupRequest{Keys: keys})
			}
		})
	}
	all.Wait()
	return nil
}

// abandonLeases leases all that it can find and goes without a word.
func (a *attacker) abandonLeases(ctx context.Context) error {
	s, arena, err := a.session(ctx)
	if err != nil {
		return err
	}
	defer s.Close()
	defer arena.Close()
	chunks := a.chunks(40)
	job, err := s.Store(ctx, 0, 0, chunks)
	if err == nil {
		_, err = job.Published(ctx)
	}
	for err == nil {
		for _, c := range chunks {
			if _, err = s.Lookup(ctx, client.LookupRequest{Request: a.rng.Uint32(), Keys: []kv.Key{c.Key}}); err != nil {
				break
			}
		}
	}
	<-ctx.Done()
	return err
}

// floodStores stores without waiting, and goes in the middle.
func (a *attacker) floodStores(ctx context.Context) error {
	s, arena, err := a.session(ctx)
	if err != nil {
		return err
	}
	defer s.Close()
	defer arena.Close()
	for n := uint32(0); err == nil; n++ {
		var job *client.StoreJob
		if job, err = s.Store(ctx, n, 0, a.chunks(100)); err == nil && n%3 == 0 {
			err = job.Cancel(ctx)
		} else if err == nil && n%16 == 0 {
			_, err = job.Published(ctx)
		}
	}
	return err
}

// comeInCrowds opens sessions and leaves them at once.
func (a *attacker) comeInCrowds(ctx context.Context) error {
	for ctx.Err() == nil {
		s, err := client.Dial(ctx, a.hello())
		if err == nil {
			s.Close()
		}
	}
	return nil
}

// waitForWords orders jobs after words that never come.
func (a *attacker) waitForWords(ctx context.Context) error {
	memory, err := client.NewArena(8192)
	if err != nil {
		return err
	}
	defer memory.Close() // after the session, which touches it when it ends
	s, arena, err := a.session(ctx)
	if err != nil {
		return err
	}
	defer s.Close()
	defer arena.Close()
	words, err := s.ShareSemaphores(ctx, memory, 0, 1024)
	for n := 0; err == nil && n < 300; n++ {
		_, err = s.Store(ctx, uint32(n), 0, a.chunks(60), client.WithTimeline(&client.Timeline{
			Semaphores: words, Wait: 0, WaitValue: 1, Done: 1 + 2*n, DoneValue: 1, Status: 2 + 2*n,
		}))
	}
	<-ctx.Done()
	return err
}

// registerMuch maps large memory that it never touches, again and again.
func (a *attacker) registerMuch(ctx context.Context) error {
	s, err := client.Dial(ctx, a.hello())
	if err != nil {
		return err
	}
	defer s.Close()
	planes := a.planes()
	for i := range planes {
		planes[i] = client.PlaneRegion{Offset: int64(i) << 30, Stride: 1 << 20, Blocks: 1000}
	}
	for ctx.Err() == nil {
		arena, err := s.NewArena(4 << 30)
		if err != nil {
			return err
		}
		if reg, err := s.Register(ctx, 0, arena, planes); err == nil {
			_ = reg.Unregister(ctx)
		}
		arena.Close()
	}
	return nil
}

// discardOthers discards, and asks for events that it does not read.
func (a *attacker) discardOthers(ctx context.Context) error {
	s, err := client.Dial(ctx, a.hello())
	if err != nil {
		return err
	}
	defer s.Close()
	for range 8 {
		if _, err := s.Events(ctx, client.Position{}, true); err != nil {
			return err
		}
	}
	for keys := a.keys(500); err == nil; slices.Reverse(keys) {
		_, err = s.Discard(ctx, 0, keys)
	}
	return err
}
