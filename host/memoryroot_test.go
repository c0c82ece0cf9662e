package host_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/gds/gdstest"
	"github.com/kvhost/kvhost/host"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/hosttest"
	"github.com/kvhost/kvhost/host/kv"
)

// A host with nothing but roots in memory stores and loads through the socket. After a restart they are empty.
func TestMemoryRoots(t *testing.T) {
	c := configuration(t)
	c.Roots = []config.Root{{Path: "memory:", Capacity: 64 << 20}, {Path: "memory:second", Capacity: 32 << 20}}
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	ctx := context.Background()
	planes := []client.PlaneRegion{{Offset: 0, Stride: 8192, Blocks: 8}, {Offset: 8 * 8192, Stride: 8192, Blocks: 8}}
	var keys []kv.Key
	for i := range 4 {
		keys = append(keys, kv.Key{byte(i + 1), 2, 3})
	}
	page := func(chunk, plane, block int) []byte {
		return bytes.Repeat([]byte(fmt.Sprintf("%d %d %d|", chunk, plane, block)), 8192/6)
	}
	for run := range 2 {
		h, stop := hosttest.Start(t, c)
		s := dial(t, h)
		arena, err := s.NewArena(2 * 8 * 8192)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Register(ctx, 0, arena, planes); err != nil {
			t.Fatal(err)
		}
		at := func(plane, block int) []byte { return arena.Bytes()[plane*8*8192+block*8192:] }
		l, err := s.Lookup(ctx, client.LookupRequest{Request: 1, Keys: keys})
		if err != nil || l.Hits() != 0 {
			t.Fatalf("run %d: %d hits of a new host: %v", run, l.Hits(), err)
		}
		var chunks []client.StoreChunk
		for i, key := range keys {
			chunks = append(chunks, client.StoreChunk{Key: key, Blocks: []uint32{uint32(2 * i), uint32(2*i + 1)}})
			for plane := range 2 {
				for block := range 2 {
					copy(at(plane, 2*i+block), page(i, plane, block))
				}
			}
		}
		job, err := s.Store(ctx, 1, 0, chunks)
		if err != nil {
			t.Fatal(err)
		}
		if r, err := job.Published(ctx); err != nil || r.Bytes != int64(len(keys)*4*8192) {
			t.Fatalf("published %+v: %v", r, err)
		}
		for i := range arena.Bytes() {
			arena.Bytes()[i] = 0xa5
		}
		if l, err = s.Lookup(ctx, client.LookupRequest{Request: 2, Keys: keys}); err != nil || l.Hits() != len(keys) {
			t.Fatalf("%d hits: %v", l.Hits(), err)
		}
		var loads []client.LoadChunk
		for i := range keys {
			loads = append(loads, client.LoadChunk{Index: i, Blocks: []uint32{uint32(7 - 2*i), uint32(6 - 2*i)}})
		}
		load, err := s.Load(ctx, l, loads, client.LoadOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if r, err := load.Wait(ctx); err != nil || len(r.Failed) > 0 {
			t.Fatalf("load %+v: %v", r, err)
		}
		for i := range keys {
			for plane := range 2 {
				for block := range 2 {
					if want := page(i, plane, block); !bytes.Equal(at(plane, 7-2*i-block)[:len(want)], want) {
						t.Errorf("chunk %d plane %d block %d differs", i, plane, block)
					}
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
		s.Close()
		stop()
	}
}

// The memory of roots is page-locked for a GPU, and given back in the end.
func TestMemoryRootIsPageLocked(t *testing.T) {
	double := gdstest.Build(t)
	cuda, cufile := gds.Libcuda, gds.Libcufile
	t.Cleanup(func() { gds.Libcuda, gds.Libcufile = cuda, cufile })
	gds.Libcuda, gds.Libcufile = []string{double.Path}, []string{double.Path}
	defer double.Forget()
	c := configuration(t)
	c.Roots = []config.Root{{Path: "memory:", Capacity: 200 << 20}}
	var log bytes.Buffer
	h, err := host.New(context.Background(), host.Config{Config: c, Log: slog.New(slog.NewTextHandler(&log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	if err := h.Close(); err != nil {
		t.Error(err)
	}
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
		if err := c.Validate(); err != nil {
			t.Fatal(err)
		}
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
	if c.Roots[0].InMemory() {
		t.Error("./memory: is a directory")
	}
}

// A host with memory before its root stores into the memory, copies to the root at once, loads from memory, and finds the
// chunks in the root after a restart. The memory is no part of the configuration that a reload is compared with.
func TestMemoryBeforeRoots(t *testing.T) {
	c := configuration(t)
	ctx := context.Background()
	key := kv.Key{1, 2, 3}
	page := bytes.Repeat([]byte("kv"), 4096)
	for run, wantLevel := range []string{"0", "1"} {
		h, stop := hosttest.StartWith(t, host.Config{Config: c, Memory: 256 << 20})
		s := dial(t, h)
		arena, err := s.NewArena(2 * 8 * 8192)
		if err != nil {
			t.Fatal(err)
		}
		planes := []client.PlaneRegion{{Offset: 0, Stride: 8192, Blocks: 8}, {Offset: 8 * 8192, Stride: 8192, Blocks: 8}}
		if _, err := s.Register(ctx, 0, arena, planes); err != nil {
			t.Fatal(err)
		}
		if run == 0 {
			copy(arena.Bytes(), page)
			job, err := s.Store(ctx, 1, 0, []client.StoreChunk{{Key: key, Blocks: []uint32{0, 1}}})
			if err != nil {
				t.Fatal(err)
			}
			if r, err := job.Published(ctx); err != nil || r.Chunks[0].Result != client.Stored {
				t.Fatalf("published %+v: %v", r, err)
			}
		}
		for i := range arena.Bytes() {
			arena.Bytes()[i] = 0xa5
		}
		l, err := s.Lookup(ctx, client.LookupRequest{Request: 2, Keys: []kv.Key{key}})
		if err != nil || l.Hits() != 1 {
			t.Fatalf("run %d: %d hits, want 1: %v", run, l.Hits(), err)
		}
		load, err := s.Load(ctx, l, []client.LoadChunk{{Blocks: []uint32{5, 3}}}, client.LoadOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if r, err := load.Wait(ctx); err != nil || len(r.Failed) > 0 {
			t.Fatalf("run %d: load %+v: %v", run, r, err)
		}
		if got := arena.Bytes()[5*8192:][:8192]; !bytes.Equal(got, page) {
			t.Errorf("run %d: the page begins with %q, want %q", run, got[:8], page[:8])
		}
		if want := `kvhost_level_hits_total{level="` + wantLevel + `"} 1`; !strings.Contains(get(t, h, "/metrics"), want) {
			t.Errorf("run %d: /metrics lacks %s", run, want)
		}
		if changed, err := h.Reload(ctx, c); err != nil || len(changed) > 0 {
			t.Errorf("run %d: a reload of the same configuration changes %v: %v", run, changed, err)
		}
		s.Close()
		stop()
	}
}
