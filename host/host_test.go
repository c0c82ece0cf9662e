package host_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/observe"
	"github.com/kvhost/kvhost/host/internal/policyset"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/server/socket"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/testkit/hosttest"
	"github.com/kvhost/kvhost/host/internal/testkit/policytest"
	"github.com/kvhost/kvhost/host/kv"
	"golang.org/x/sys/unix"
)

func configuration(t testing.TB) *config.Config {
	t.Helper()
	c := hosttest.Configuration(t)
	c.HTTP.Listen = "127.0.0.1:0"
	c.Roots = []config.Root{{Path: filepath.Join(filepath.Dir(c.Socket), "root"), Capacity: 64 << 20}}
	c.Engine.MaxStagingMemory = 16 << 20
	return c
}

// dial opens a session with pages of 8 KiB in two layers of K and V: eight blocks, two of which are a chunk.
func dial(t *testing.T, h *host.Host) *hosttest.Client {
	t.Helper()
	return hosttest.Dial(t, hosttest.Hello(h.Socket(), kv.Uniform(2, 2, 1, 8192)), 8, 0, 0)
}

func get(t *testing.T, h *host.Host, path string) string {
	t.Helper()
	r, err := http.Get("http://" + h.HTTPAddr() + path)
	testenv.OK(t, err)
	defer r.Body.Close()
	text, err := io.ReadAll(r.Body)
	if err != nil || r.StatusCode != http.StatusOK {
		t.Fatalf("get %s: %s, %v", path, r.Status, err)
	}
	return string(text)
}

// What the configuration takes for the least is enough for the engine.
func TestTheLeastSlotsStart(t *testing.T) {
	c := configuration(t)
	i := slices.IndexFunc(config.Keys(), func(k *config.Key) bool { return k.Path() == "engine.slot_bytes" })
	least := config.Keys()[i].Min
	c.Engine.SlotBytes, c.Engine.MaxStagingMemory = least, least
	_, stop := hosttest.Start(t, c)
	stop()
}

// TestStoreRestartLoad goes the whole way: store through the socket, end the host, start another on the same root,
// load.
func TestStoreRestartLoad(t *testing.T) {
	c := configuration(t)
	ctx := context.Background()
	key := kv.Key{1, 2, 3}
	page := func(plane, block int) []byte { return []byte(fmt.Sprintf("plane %d block %d|", plane, block)) }

	h, stop := hosttest.Start(t, c)
	s := dial(t, h)
	for plane := range 2 {
		for block := range 2 {
			copy(s.Page(plane, block), page(plane, block))
		}
	}
	if r := s.Put(client.StoreChunk{Key: key, Blocks: []uint32{0, 1}}); r.Bytes != 4*8192 {
		t.Fatalf("published %+v, want 4 pages", r)
	}
	metrics := get(t, h, "/metrics")
	for _, want := range []string{
		"kvhost_stored_files_total 1", `kvhost_root_entries{root="` + c.Roots[0].Path + `"} 1`, "kvhost_sessions 1",
		`kvhost_policy_calls_total{digest="native",module="fanout",policy="fanout",role="place",root=""}`,
		`kvhost_transfer_seconds_count{direction="store",gpu="host",root="` + c.Roots[0].Path + `",route="staged"} 1`,
		`kvhost_transfer_queued{direction="load",gpu="host",root="` + c.Roots[0].Path + `"} 0`,
		`kvhost_transfer_in_flight{direction="store",gpu="host",root="` + c.Roots[0].Path + `",route="staged"} 0`,
	} {
		if !strings.Contains(metrics, want) {
			t.Errorf("/metrics lacks %s", want)
		}
	}
	for _, probe := range []string{"/livez", "/readyz"} {
		if got := get(t, h, probe); got != "ok\n" {
			t.Errorf("%s says %q", probe, got)
		}
	}
	st, err := proto.Status(ctx, h.Socket())
	if err != nil || st.Counters["stored_files"] != 1 || len(st.Policies) != 4 || st.Roots[0].Entries != 1 {
		t.Errorf("status %v: %v", st, err)
	}
	s.Close()
	stop()

	h, _ = hosttest.Start(t, c)
	s = dial(t, h)
	s.Poison()
	l := s.Find(key)
	if l.Hits() != 1 {
		t.Fatalf("lookup after the restart: %d hits, want 1", l.Hits())
	}
	if r := s.Get(l, client.LoadOptions{}, client.LoadChunk{Blocks: []uint32{5, 3}}); len(r.Failed) > 0 {
		t.Fatalf("load %+v, want no failed block", r)
	}
	for plane := range 2 {
		for block, id := range []int{5, 3} {
			if want := page(plane, block); !strings.HasPrefix(string(s.Page(plane, id)), string(want)) {
				t.Errorf("plane %d block %d came back as %q", plane, block, s.Page(plane, id)[:len(want)])
			}
		}
	}
}

func TestRefusals(t *testing.T) {
	other := configuration(t)
	running, _ := hosttest.Start(t, other)
	notWasm := filepath.Join(t.TempDir(), "bad.wasm")
	testenv.OK(t, os.WriteFile(notWasm, []byte("not wasm"), 0o600))
	for name, c := range map[string]struct {
		change func(*config.Config)
		want   error
	}{
		"policy is not wasm":   {func(c *config.Config) { c.Policies = []config.Policy{{Module: notWasm}} }, policyset.ErrPolicy},
		"policy is not there":  {func(c *config.Config) { c.Policies = []config.Policy{{Module: "nowhere.wasm"}} }, policyset.ErrPolicy},
		"root in use":          {func(c *config.Config) { c.Roots = other.Roots }, store.ErrRootBusy},
		"http address in use":  {func(c *config.Config) { c.HTTP.Listen = running.HTTPAddr() }, observe.ErrHTTP},
		"new root, old socket": {func(c *config.Config) { c.Socket = other.Socket }, socket.ErrInUse},
		"http token too short": {func(c *config.Config) { c.HTTP.TokenFile = notWasm }, observe.ErrCredential},
		"root cannot be made":  {func(c *config.Config) { c.Roots[0].Path = "/proc/nowhere" }, os.ErrNotExist},
	} {
		t.Run(name, func(t *testing.T) {
			conf := configuration(t)
			c.change(conf)
			h, err := host.New(context.Background(), host.Config{Config: conf})
			if !errors.Is(err, c.want) {
				t.Errorf("start: got %v, want %v", err, c.want)
			}
			if err == nil {
				h.Close()
			}
			if _, err := os.Stat(conf.Roots[0].Path); name != "root in use" && !strings.HasPrefix(name, "policy") && !errors.Is(err, os.ErrNotExist) {
				t.Errorf("after the refusal: want no root made, got %v", err)
			}
		})
	}
	t.Run("socket in use", func(t *testing.T) {
		conf := configuration(t)
		conf.Socket = other.Socket
		testenv.OK(t, os.Mkdir(conf.Roots[0].Path, 0o700)) // else New refuses, too: TestRefusals
		h, err := host.New(context.Background(), host.Config{Config: conf})
		testenv.OK(t, err)
		if err := h.Run(context.Background()); !errors.Is(err, socket.ErrInUse) {
			t.Errorf("run on a socket in use: got %v", err)
		}
	})
}

// A host with session.idle_exit lives as long as a session does, and ends once it has been without one for so long.
func TestIdleExit(t *testing.T) {
	c := configuration(t)
	ended := make(chan error, 1)
	var h *host.Host
	var first *client.Session
	for c.Session.IdleExit = 2 * time.Second; first == nil; c.Session.IdleExit *= 2 {
		var err error
		h, err = host.New(t.Context(), host.Config{Config: c})
		testenv.OK(t, err)
		go func() { ended <- h.Run(t.Context()) }()
		<-h.Ready()
		hello := hosttest.Hello(h.Socket(), kv.Uniform(2, 2, 1, 8192))
		hello.Engine = "first"
		if first, err = client.Dial(t.Context(), hello); err != nil { // a slow machine: it ended before there was a session
			testenv.OK(t, <-ended)
		}
	}
	c.Session.IdleExit /= 2
	s := hosttest.Dial(t, hosttest.Hello(h.Socket(), kv.Uniform(2, 2, 1, 8192)), 8, 0, 0)
	testenv.OK(t, first.Close())
	select {
	case err := <-ended:
		t.Fatalf("the host ended with %v while a session was open", err)
	case <-time.After(c.Session.IdleExit + c.Session.IdleExit/2):
	}
	if got := s.Find(kv.Key{1}).Hits(); got != 0 {
		t.Errorf("lookup in an empty root: %d hits, want 0", got)
	}
	testenv.OK(t, s.Close())
	if err := <-ended; err != nil {
		t.Errorf("the end of an idle host: %v, want nil", err)
	}
}

// What the operator pins reaches the sessions.
func TestPins(t *testing.T) {
	c := configuration(t)
	c.Session.Pins = map[string]string{"dtype": "bf16"}
	h, _ := hosttest.Start(t, c)
	dial(t, h)
	hello := hosttest.Hello(h.Socket(), kv.Uniform(2, 2, 1, 8192))
	hello.Engine, hello.Namespace.DType = "f", "fp8"
	s, err := client.Dial(t.Context(), hello)
	if err == nil {
		s.Close()
	}
	if !errors.Is(err, client.ErrDisagreement) || !strings.Contains(err.Error(), "dtype") {
		t.Fatalf("HELLO with another dtype than the pinned one: got %v", err)
	}
}

// The memory of each policy and of all is in the metrics and in the status, beside what all may have.
func TestPolicyMemoryIsShown(t *testing.T) {
	c := configuration(t)
	c.PolicyDir, c.PolicyMemory = policytest.Dir(t, "lru", "fanout", "sieve"), 1<<30
	c.Policies = []config.Policy{{Module: "lru"}, {Module: "fanout"}, {Module: "sieve", Shadow: true}}
	h, _ := hosttest.Start(t, c)
	st := h.Status()
	var sum, acting uint64
	for _, p := range st.Policies {
		if p.Trial == nil {
			acting += p.Memory
		}
		if sum += p.Memory; (p.Memory == 0) != (p.Digest == "") {
			t.Errorf("%s, %s has %d bytes", p.Name, p.Digest, p.Memory)
		}
	}
	if sum == 0 || sum != st.PolicyMemory || st.PolicyMemoryLimit != 1<<30 {
		t.Errorf("%d bytes by policy, %d of %d in all", sum, st.PolicyMemory, st.PolicyMemoryLimit)
	}
	metrics := get(t, h, "/metrics")
	var shown float64
	for line := range strings.Lines(metrics) {
		if _, value, found := strings.Cut(line, "} "); found && strings.HasPrefix(line, "kvhost_policy_memory_bytes{") {
			var bytes float64
			if _, err := fmt.Sscan(value, &bytes); err != nil {
				t.Fatalf("metric %q: %v", line, err)
			}
			shown += bytes
		}
	}
	if shown != float64(acting) {
		t.Errorf("the metrics show %.0f bytes of policies that act, the status %d", shown, acting)
	}
	for _, want := range []string{
		fmt.Sprintf("kvhost_policies_memory_bytes %v\n", float64(sum)), "kvhost_policies_memory_limit_bytes 1.073741824e+09\n",
	} {
		if !strings.Contains(metrics, want) {
			t.Errorf("/metrics lacks %s", want)
		}
	}
}

// crowdOf is the environment variable that makes TestCrowdsLeaveTheStoreItsFiles the crowd: addresses to connect to.
const crowdOf = "KVHOST_TEST_CROWD_OF"

// However many connections clients open, and with a message half sent on each, the store can open its files: what is stored
// is a hit and can be loaded, and what is new is stored.
func TestCrowdsLeaveTheStoreItsFiles(t *testing.T) {
	const files, connections = 512, 1200
	if to := os.Getenv(crowdOf); to != "" {
		crowd(strings.Split(to, " "), connections)
		return
	}
	var limit unix.Rlimit
	testenv.OK(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	few := unix.Rlimit{Cur: files, Max: limit.Max}
	testenv.OK(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &few))
	t.Cleanup(func() { _ = unix.Setrlimit(unix.RLIMIT_NOFILE, &limit) })
	h, _ := hosttest.Start(t, configuration(t))
	s := dial(t, h)
	const before, after = 20, 40
	key := func(n int) kv.Key { return kv.Key{byte(n), 1} }
	for n := range before {
		s.Put(client.StoreChunk{Key: key(n), Blocks: []uint32{0, 1}})
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestCrowdsLeaveTheStoreItsFiles$")
	cmd.Env = append(os.Environ(), crowdOf+"=unix:"+h.Socket()+" unix:"+h.Socket()+proto.DescriptorSuffix+" tcp:"+h.HTTPAddr())
	out, err := cmd.StdoutPipe()
	testenv.OK(t, err)
	in, err := cmd.StdinPipe()
	testenv.OK(t, err)
	testenv.OK(t, cmd.Start())
	defer func() { _ = in.Close(); _ = cmd.Wait() }()
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "full\n" {
		t.Fatalf("the crowd says %q, %v", line, err)
	}
	open, err := os.ReadDir("/proc/self/fd")
	testenv.OK(t, err)
	t.Logf("%d of %d descriptors are open", len(open), files)
	if len(open) > files/2 {
		t.Errorf("%d of %d descriptors are open, want half of them left for the store", len(open), files)
	}
	for n := before; n < after; n++ {
		if r := s.Put(client.StoreChunk{Key: key(n), Blocks: []uint32{0, 1}}); r.Bytes == 0 {
			t.Errorf("store of chunk %d: %+v, want it stored", n, r)
		}
	}
	for n := range after {
		l := s.Find(key(n))
		if l.Hits() != 1 {
			t.Errorf("chunk %d: %d hits, want 1", n, l.Hits())
		} else if r := s.Get(l, client.LoadOptions{}, client.LoadChunk{Blocks: []uint32{4, 5}}); len(r.Failed) > 0 {
			t.Errorf("load of chunk %d: %+v, want no failed block", n, r)
		}
	}
}

// crowd opens so many connections to each address, and sends less than is wanted on each.
func crowd(addresses []string, each int) {
	var open []net.Conn
	for _, address := range addresses {
		network, to, _ := strings.Cut(address, ":")
		for range each {
			c, err := net.DialTimeout(network, to, time.Second)
			if err != nil {
				break // it accepts no more
			}
			_, _ = c.Write([]byte("PRI"))
			open = append(open, c)
		}
	}
	fmt.Println("full")
	_, _ = os.Stdin.Read(make([]byte, 1)) // until the test closes it
	for _, c := range open {
		c.Close()
	}
}
