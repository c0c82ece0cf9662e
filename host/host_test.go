package host_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/host"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/hosttest"
	"github.com/kvhost/kvhost/host/internal/observe"
	"github.com/kvhost/kvhost/host/internal/policyset"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/server/socket"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/kv"
)

func configuration(t *testing.T) *config.Config {
	t.Helper()
	c := hosttest.Configuration(t)
	c.HTTP.Listen = "127.0.0.1:0"
	c.Roots = []config.Root{{Path: filepath.Join(filepath.Dir(c.Socket), "root"), Capacity: 64 << 20}}
	c.Engine.MaxStagingMemory = 16 << 20
	return c
}

func dial(t *testing.T, h *host.Host) *client.Session {
	t.Helper()
	s, err := client.Dial(context.Background(), client.Hello{
		Socket: h.Socket(), Engine: "e", Role: "worker", LocalRanks: 1,
		Namespace: kv.Namespace{Model: "m", DType: "bf16", KeyBytes: 32, TokensPerBlock: 16,
			Groups: []kv.Group{{Geometry: kv.Uniform(2, 2, 1, 8192)}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func get(t *testing.T, h *host.Host, path string) string {
	t.Helper()
	r, err := http.Get("http://" + h.HTTPAddr() + path)
	if err != nil {
		t.Fatal(err)
	}
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
	arena, err := s.NewArena(4 * 4 * 8192)
	if err != nil {
		t.Fatal(err)
	}
	planes := []client.PlaneRegion{{Offset: 0, Stride: 8192, Blocks: 8}, {Offset: 8 * 8192, Stride: 8192, Blocks: 8}}
	if _, err := s.Register(ctx, 0, arena, planes); err != nil {
		t.Fatal(err)
	}
	for plane := range 2 {
		for block := range 2 {
			copy(arena.Bytes()[plane*8*8192+block*8192:], page(plane, block))
		}
	}
	job, err := s.Store(ctx, 1, 0, []client.StoreChunk{{Key: key, Blocks: []uint32{0, 1}}})
	if err != nil {
		t.Fatal(err)
	}
	if r, err := job.Published(ctx); err != nil || r.Bytes != 4*8192 {
		t.Fatalf("published %+v: %v", r, err)
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
	if arena, err = s.NewArena(4 * 4 * 8192); err != nil {
		t.Fatal(err)
	}
	for i := range arena.Bytes() {
		arena.Bytes()[i] = 0xa5
	}
	if _, err := s.Register(ctx, 0, arena, planes); err != nil {
		t.Fatal(err)
	}
	l, err := s.Lookup(ctx, client.LookupRequest{Request: 2, Keys: []kv.Key{key}})
	if err != nil || l.Hits() != 1 {
		t.Fatalf("lookup after the restart: %+v %v", l, err)
	}
	load, err := s.Load(ctx, l, []client.LoadChunk{{Index: 0, Blocks: []uint32{5, 3}}}, client.LoadOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if r, err := load.Wait(ctx); err != nil || len(r.Failed) > 0 {
		t.Fatalf("load %+v: %v", r, err)
	}
	for plane := range 2 {
		for block, id := range []int{5, 3} {
			at := plane*8*8192 + id*8192
			if want := page(plane, block); string(arena.Bytes()[at:at+len(want)]) != string(want) {
				t.Errorf("plane %d block %d came back as %q", plane, block, arena.Bytes()[at:at+len(want)])
			}
		}
	}
}

func TestRefusals(t *testing.T) {
	other := configuration(t)
	running, _ := hosttest.Start(t, other)
	notWasm := filepath.Join(t.TempDir(), "bad.wasm")
	if err := os.WriteFile(notWasm, []byte("not wasm"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		change func(*config.Config)
		want   error
	}{
		"policy is not wasm":   {func(c *config.Config) { c.Policies = []config.Policy{{Module: notWasm}} }, policyset.ErrPolicy},
		"policy is not there":  {func(c *config.Config) { c.Policies = []config.Policy{{Module: "nowhere.wasm"}} }, policyset.ErrPolicy},
		"root in use":          {func(c *config.Config) { c.Roots = other.Roots }, store.ErrRootBusy},
		"http address in use":  {func(c *config.Config) { c.HTTP.Listen = running.HTTPAddr() }, observe.ErrHTTP},
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
		})
	}
	t.Run("socket in use", func(t *testing.T) {
		conf := configuration(t)
		conf.Socket = other.Socket
		h, err := host.New(context.Background(), host.Config{Config: conf})
		if err != nil {
			t.Fatal(err)
		}
		if err := h.Run(context.Background()); !errors.Is(err, socket.ErrInUse) {
			t.Errorf("run on a socket in use: got %v", err)
		}
	})
}
