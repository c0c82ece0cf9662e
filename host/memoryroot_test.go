package host_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/testkit/hosttest"
	"github.com/kvhost/kvhost/host/kv"
)

// A host with nothing but roots in memory stores and loads through the socket. After a restart they are empty.
func TestMemoryRoots(t *testing.T) {
	c := configuration(t)
	c.Roots = []config.Root{{Path: "memory:", Capacity: 64 << 20}, {Path: "memory:second", Capacity: 32 << 20}}
	testenv.OK(t, c.Validate())
	random := rand.New(rand.NewPCG(7, 8))
	const chunks = 4
	for run := range 2 {
		h, two, stop := twoRanks(t, host.Config{Config: c})
		for n := range chunks {
			for rank, r := range two {
				if rank == 0 && r.Find(compressionKey(n)).Hits() != 0 {
					t.Errorf("run %d: a new host has chunk %d, want none", run, n)
				}
				r.store(n, random)
			}
		}
		for n := range chunks {
			for rank, r := range two {
				if !r.load(n, n%2 == rank, random) {
					t.Errorf("run %d: chunk %d is gone", run, n)
				}
			}
		}
		metrics := get(t, h, "/metrics")
		for _, want := range []string{
			`kvhost_root_memory_bytes{root="memory:",state="pending"} 0`,
			`kvhost_root_memory_bytes{root="memory:second",state="used"}`, `,route="memory"}`,
		} {
			if !strings.Contains(metrics, want) {
				t.Errorf("/metrics lacks %s", want)
			}
		}
		if strings.Contains(metrics, `route="staged"} 1`) {
			t.Error("a piece was staged")
		}
		stop()
	}
}

// The memory of roots is page-locked for a GPU, and given back in the end.
func TestMemoryRootIsPageLocked(t *testing.T) {
	double := onDouble(t)
	defer double.Forget()
	c := configuration(t)
	c.Roots = []config.Root{{Path: "memory:", Capacity: 200 << 20}}
	var log bytes.Buffer
	h, err := host.New(context.Background(), host.Config{Config: c, Log: slog.New(slog.NewTextHandler(&log, nil))})
	testenv.OK(t, err)
	testenv.NoError(t, h.Close())
	locked, unlocked := double.Calls("cuMemHostRegister_v2"), double.Calls("cuMemHostUnregister")
	if locked < 3 || locked != unlocked { // commands, slots and the first step
		t.Errorf("memory registered %d times, unregistered %d times", locked, unlocked)
	}
	if text := log.String(); !strings.Contains(text, "route=memory") || double.Calls("cuFileDriverOpen") != 0 {
		t.Errorf("cuFile was opened, or the route not told: %s", text)
	}
}

// What has no meaning for memory is refused by name.
func TestMemoryRootsAreValidated(t *testing.T) {
	for name, change := range map[string]func(r *config.Root){
		"path":          func(r *config.Root) { r.Path = "memory:A/b" },
		"capacity":      func(r *config.Root) { r.Capacity = 4096 },
		"shared":        func(r *config.Root) { r.Shared = true },
		"route":         func(r *config.Root) { r.Route = config.RouteDirect },
		"require_mount": func(r *config.Root) { r.RequireMount = true },
		"min_free":      func(r *config.Root) { r.MinFree.Bytes = 1 },
		"daily_writes":  func(r *config.Root) { r.DailyWrites = 1 },
	} {
		c := configuration(t)
		c.Roots = []config.Root{{Path: "memory:", Capacity: 1 << 30}}
		testenv.OK(t, c.Validate())
		change(&c.Roots[0])
		var problem *config.Problem
		if err := c.Validate(); !errors.As(err, &problem) || problem.Path != "root[0]."+name {
			t.Errorf("root in memory with %s: got %v", name, err)
		}
	}
	c := configuration(t)
	c.Roots = []config.Root{{Path: "memory:a", Capacity: 1 << 30}, {Path: "memory:a", Capacity: 1 << 30}}
	if err := c.Validate(); err == nil {
		t.Error("two roots with one name")
	}
	c.Roots = []config.Root{{Path: "./memory:", Capacity: 1 << 30}}
	if c.Roots[0].Kind() != config.Directory {
		t.Error("./memory: is a directory")
	}
}

// A host with memory before its root stores into the memory, copies to the root at once, loads from memory, and finds the
// chunks in the root after a restart. The memory is no part of the configuration that a reload is compared with.
func TestMemoryBeforeRoots(t *testing.T) {
	c := configuration(t)
	key := kv.Key{1, 2, 3}
	page := bytes.Repeat([]byte("kv"), 4096)
	for run, wantLevel := range []string{"0", "1"} {
		h, stop := hosttest.StartWith(t, host.Config{Config: c, Memory: 256 << 20})
		s := dial(t, h)
		if run == 0 {
			copy(s.Page(0, 0), page)
			if r := s.Put(client.StoreChunk{Key: key, Blocks: []uint32{0, 1}}); r.Chunks[0].Result != client.Stored {
				t.Fatalf("published %+v, want a stored chunk", r)
			}
		}
		s.Poison()
		l := s.Find(key)
		if l.Hits() != 1 {
			t.Fatalf("run %d: %d hits, want 1", run, l.Hits())
		}
		if r := s.Get(l, client.LoadOptions{}, client.LoadChunk{Blocks: []uint32{5, 3}}); len(r.Failed) > 0 {
			t.Fatalf("run %d: load %+v, want no failed block", run, r)
		}
		if got := s.Page(0, 5); !bytes.Equal(got, page) {
			t.Errorf("run %d: the page begins with %q, want %q", run, got[:8], page[:8])
		}
		if want := `kvhost_level_hits_total{level="` + wantLevel + `"} 1`; !strings.Contains(get(t, h, "/metrics"), want) {
			t.Errorf("run %d: /metrics lacks %s", run, want)
		}
		if changed, err := h.Reload(t.Context(), c); err != nil || len(changed) > 0 {
			t.Errorf("run %d: a reload of the same configuration changes %v: %v", run, changed, err)
		}
		s.Close()
		stop()
	}
}
