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
	"github.com/kvhost/kvhost/host/kv"
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
