package replay_test

import (
	"container/list"
	"context"
	"encoding/json"
	"errors"
	"math"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/drive"
	"github.com/kvhost/kvhost/host/internal/replay"
	"github.com/kvhost/kvhost/host/internal/testkit/hosttest"
	"github.com/kvhost/kvhost/host/internal/testkit/policytest"
	"github.com/kvhost/kvhost/host/internal/trace"
	"github.com/kvhost/kvhost/host/kv"
)

// textbook is LRU of a number of chunks over the same order of events: a prefix lookup touches what it grants in key
// order; a chunk that is stored while resident is not touched.
func textbook(requests [][]uint64, capacity int) (hits, resident int64) {
	order := list.New() // front is the next victim
	at := map[kv.Key]*list.Element{}
	for _, ids := range requests {
		keys := drive.ChainKeys(nil, ids)
		n := 0
		for n < len(keys) && at[keys[n]] != nil {
			order.MoveToBack(at[keys[n]])
			n++
		}
		hits += int64(n)
		for _, k := range keys[n:] {
			if at[k] != nil {
				resident++
				continue
			}
			if len(at) == capacity {
				victim := order.Remove(order.Front()).(kv.Key)
				delete(at, victim)
			}
			at[k] = order.PushBack(k)
		}
	}
	return hits, resident
}

// With one session and on-demand eviction the host's hits equal the textbook's exactly: the capacity in chunks is
// exact, and so is the order of the policy's events. Windows smaller than a request change nothing.
func TestHitsAreTheTextbooks(t *testing.T) {
	testenv.Slow(t)
	requests := mixture(t, 120)
	path := write(t, requests)
	for _, test := range []struct {
		name    string
		shape   replay.Shape
		chunks  int
		memory  int64
		modules []string
	}{
		{"small", replay.Shape{Ranks: 1, ChunkBytes: 8192, PageBytes: 2048}, 300, 0, nil},
		{"odd pages", replay.Shape{Ranks: 1, ChunkBytes: 3 * 1234, PageBytes: 1234}, 500, 0, nil},
		{"in parts", replay.Shape{Ranks: 1, ChunkBytes: 8192, PageBytes: 4096}, 300, 7 * 8192, nil},
		{"in wasm", replay.Shape{Ranks: 1, ChunkBytes: 8192, PageBytes: 2048}, 300, 0, []string{"lru", "fanout"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			want, resident := textbook(requests, test.chunks)
			socket, _ := start(t, t.TempDir(), int64(test.chunks)*entryBytes(t, test.shape), func(c *config.Config) {
				for _, m := range test.modules {
					c.Policies = append(c.Policies, config.Policy{Module: filepath.Join(policytest.Dir(t, m),
						m+".wasm")})
				}
			})
			r := play(t, replay.Options{Trace: path, Socket: socket, Shape: test.shape, Memory: test.memory})
			for _, p := range r.Policies {
				// Victims that are named ahead take few calls; a piece is named once, when it is stored.
				if p.Role == "evict" && p.Calls*20 > p.Records || p.Role == "place" && p.Records != uint64(r.Stored) ||
					p.Faults > 0 {
					t.Errorf("%d stored: %+v", r.Stored, p)
				}
			}
			if r.Hits != want || r.Resident != resident {
				t.Errorf("%d hits, %d found resident; the textbook has %d, %d", r.Hits, r.Resident, want, resident)
			}
			if want == 0 || r.Stored == 0 || r.Shed != 0 || r.Refused != 0 {
				t.Errorf("%d stored, %d shed, %d refused", r.Stored, r.Shed, r.Refused)
			}
			if r.BytesLoaded != r.Hits*test.shape.ChunkBytes || r.BytesStored != r.Stored*test.shape.ChunkBytes {
				t.Errorf("%d bytes loaded for %d hits, %d stored for %d chunks", r.BytesLoaded, r.Hits, r.BytesStored,
					r.Stored)
			}
			if r.HitRatio != float64(r.Hits)/float64(r.Accesses) || r.Requests != int64(len(requests)) {
				t.Errorf("hit ratio %v, %d requests", r.HitRatio, r.Requests)
			}
		})
	}
}

// N chunks fit a capacity of N entries, and one more does not.
func TestCapacityInChunksIsExact(t *testing.T) {
	for _, shape := range []replay.Shape{
		{Ranks: 1, ChunkBytes: 4096}, {Ranks: 3, ChunkBytes: 8192, PageBytes: 1024, Layers: 4},
		{Ranks: 2, ChunkBytes: 1000, PageBytes: 10},
	} {
		ids := []uint64{1, 2, 3, 4, 5, 6, 7}
		path := write(t, [][]uint64{ids, ids})
		socket, _ := start(t, t.TempDir(), int64(len(ids))*entryBytes(t, shape))
		if r := play(t, replay.Options{Trace: path, Socket: socket, Shape: shape}); r.Hits != int64(len(ids)) ||
			r.Stored != int64(len(ids)) {
			t.Errorf("%+v: %d hits, %d stored of %d", shape, r.Hits, r.Stored, len(ids))
		}
		socket, _ = start(t, t.TempDir(), int64(len(ids))*entryBytes(t, shape)-4096)
		if r := play(t, replay.Options{Trace: path, Socket: socket, Shape: shape}); r.Hits == int64(len(ids)) {
			t.Errorf("%+v: all hits although the capacity is a page short", shape)
		}
	}
}

// Many sessions of many ranks during eviction: no wrong byte, and progress adds up.
func TestSessionsAndRanks(t *testing.T) {
	path := write(t, mixture(t, 60))
	shape := replay.Shape{Ranks: 2, ChunkBytes: 16 << 10, PageBytes: 4096, Layers: 2}
	socket, _ := start(t, t.TempDir(), 200*entryBytes(t, shape))
	var began, steps, accesses, hits atomic.Int64
	r := play(t, replay.Options{
		Trace: path, Socket: socket, Shape: shape, Sessions: 3, Speed: 1000,
		Begin: func(n int) { began.Store(int64(n)) },
		Step: func(q replay.Request) {
			steps.Add(1)
			accesses.Add(int64(q.Accesses))
			hits.Add(int64(q.Hits))
		},
	})
	if began.Load() != 60 || steps.Load() != 60 || accesses.Load() != r.Accesses || hits.Load() != r.Hits {
		t.Errorf("progress: %d begun, %d steps, %d accesses, %d hits; report %d, %d",
			began.Load(), steps.Load(), accesses.Load(), hits.Load(), r.Accesses, r.Hits)
	}
	if r.Hits == 0 || r.Load.Count == 0 || r.Store.P99 < r.Store.P50 || len(r.Policies) == 0 {
		t.Errorf("report %+v", r)
	}
}

// A replay finds what the previous one stored, also after a restart of the host.
func TestFoundAgainAfterRestart(t *testing.T) {
	requests := [][]uint64{{1, 2, 3}, {1, 2, 4, 5}}
	path, root, shape := write(t, requests), t.TempDir(), replay.Shape{Ranks: 1, ChunkBytes: 8192}
	socket, stop := start(t, root, 1<<20)
	if r := play(t, replay.Options{Trace: path, Socket: socket, Shape: shape}); r.Hits != 2 || r.Stored != 5 {
		t.Fatalf("first: %d hits, %d stored", r.Hits, r.Stored)
	}
	stop()
	socket, _ = start(t, root, 1<<20)
	if r := play(t, replay.Options{Trace: path, Socket: socket, Shape: shape, Limit: 1}); r.Hits != 3 ||
		r.Stored != 0 || r.Requests != 1 {
		t.Errorf("after the restart: %d hits, %d stored in %d requests", r.Hits, r.Stored, r.Requests)
	}
}

// A replay finds wrong bytes, whoever stored them: here a client stores zeros under a replay's key.
func TestWrongBytesAreFound(t *testing.T) {
	ids := []uint64{7, 8, 9}
	path, shape := write(t, [][]uint64{ids}), replay.Shape{Ranks: 1, ChunkBytes: 8192, PageBytes: 8192}
	socket, _ := start(t, t.TempDir(), 1<<20)
	ns, err := shape.Namespace()
	testenv.OK(t, err)
	s, err := client.Dial(t.Context(), client.Hello{Socket: socket, Engine: "liar", Namespace: *ns})
	testenv.OK(t, err)
	defer s.Close()
	arena, err := s.NewArena(8192)
	testenv.OK(t, err)
	defer arena.Close()
	if _, err := s.Register(t.Context(), 0, arena, []client.PlaneRegion{{Stride: 8192, Blocks: 1}}); err != nil {
		t.Fatal(err)
	}
	job, err := s.Store(t.Context(), 1, 0, []client.StoreChunk{{Key: drive.ChainKeys(nil, ids)[0],
		Blocks: []uint32{0}}})
	testenv.OK(t, err)
	if _, err := job.Published(t.Context()); err != nil {
		t.Fatal(err)
	}
	r, err := replay.Run(t.Context(), replay.Options{Trace: path, Socket: socket, Shape: shape})
	testenv.OK(t, err)
	if r.MismatchedBytes < 8000 || r.Hits != 0 {
		t.Errorf("%d mismatched bytes, %d hits", r.MismatchedBytes, r.Hits)
	}
	if err := r.Err(); !errors.Is(err, replay.ErrMismatch) || !strings.Contains(err.Error(), "chunk 0, rank 0") {
		t.Errorf("verdict: %v", err)
	}
}

// The host detects damage on disk: the chunk fails to load, is stored again, and no wrong byte is served.
func TestDamagedFilesAreFailedLoads(t *testing.T) {
	ids := []uint64{7, 8, 9}
	path, shape, root := write(t, [][]uint64{ids}), replay.Shape{Ranks: 1, ChunkBytes: 8192}, t.TempDir()
	socket, _ := start(t, root, 1<<20)
	play(t, replay.Options{Trace: path, Socket: socket, Shape: shape})
	damaged := 0
	if err := filepath.WalkDir(root, func(name string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() || strings.Contains(name, ".kvhost") {
			return err
		}
		f, err := os.OpenFile(name, os.O_RDWR, 0)
		if err != nil {
			return err
		}
		defer f.Close()
		damaged++
		_, err = f.WriteAt([]byte("damage"), 8192+100)
		return err
	}); err != nil || damaged != 3 {
		t.Fatalf("%d files damaged, %v", damaged, err)
	}
	r, err := replay.Run(t.Context(), replay.Options{Trace: path, Socket: socket, Shape: shape})
	testenv.OK(t, err)
	if r.MismatchedBytes != 0 || r.FailedLoads != 3 || r.Stored != 3 || !errors.Is(r.Err(), replay.ErrFailures) {
		t.Errorf("%d mismatched, %d failed loads, %d stored, verdict %v", r.MismatchedBytes, r.FailedLoads, r.Stored,
			r.Err())
	}
	if r := play(t, replay.Options{Trace: path, Socket: socket, Shape: shape}); r.Hits != 3 {
		t.Errorf("afterwards %d hits", r.Hits)
	}
}

func TestRunRefuses(t *testing.T) {
	path, shape := write(t, [][]uint64{{1}}), replay.Shape{Ranks: 1, ChunkBytes: 4096}
	empty := write(t, nil)
	started := func(context.Context) (string, func() error, error) {
		t.Error("a host was started")
		return "", nil, errors.New("started")
	}
	for name, test := range map[string]struct {
		o    replay.Options
		want error
	}{
		"no trace":   {replay.Options{Socket: "s", Shape: shape}, replay.ErrOptions},
		"no socket":  {replay.Options{Trace: path, Shape: shape}, replay.ErrOptions},
		"sessions":   {replay.Options{Trace: path, Socket: "s", Shape: shape, Sessions: -1}, replay.ErrOptions},
		"speed":      {replay.Options{Trace: path, Socket: "s", Shape: shape, Speed: math.NaN()}, replay.ErrOptions},
		"limit":      {replay.Options{Trace: path, Socket: "s", Shape: shape, Limit: -1}, replay.ErrOptions},
		"memory":     {replay.Options{Trace: path, Socket: "s", Shape: shape, Memory: -1}, replay.ErrOptions},
		"shape":      {replay.Options{Trace: path, Socket: "s"}, replay.ErrOptions},
		"empty":      {replay.Options{Trace: empty, Start: started, Shape: shape}, replay.ErrOptions},
		"no file":    {replay.Options{Trace: path + "x", Start: started, Shape: shape}, trace.ErrOpen},
		"no host":    {replay.Options{Trace: path, Socket: path + ".sock", Shape: shape}, client.ErrHostGone},
		"no request": {replay.Options{Trace: "run_test.go", Start: started, Shape: shape}, trace.ErrFormat},
	} {
		if _, err := replay.Run(t.Context(), test.o); !errors.Is(err, test.want) {
			t.Errorf("%s: running gave %v, want %v", name, err, test.want)
		}
	}
}

func TestReportForms(t *testing.T) {
	path := write(t, [][]uint64{{1, 2}, {1, 2, 3}})
	socket, _ := start(t, t.TempDir(), 1<<20)
	r := play(t, replay.Options{Trace: path, Socket: socket, Shape: replay.Shape{Ranks: 1, ChunkBytes: 4096}})
	var table strings.Builder
	testenv.OK(t, r.Table(&table))
	for _, want := range []string{"chunk accesses", "5", "hit ratio 0.4000", "mismatched bytes  0", "policy evict",
		" ns per chunk access (admit ", "p99", "GB/s"} {
		if !strings.Contains(table.String(), want) {
			t.Errorf("no %q in\n%s", want, table.String())
		}
	}
	text, err := json.Marshal(r)
	testenv.OK(t, err)
	var fields map[string]any
	testenv.OK(t, json.Unmarshal(text, &fields))
	for name, want := range map[string]float64{"requests": 2, "accesses": 5, "hits": 2, "hit_ratio": 0.4,
		"bytes_loaded": 8192, "bytes_stored": 3 * 4096, "mismatched_bytes": 0} {
		if fields[name] != want {
			t.Errorf("%s is %v, want %v", name, fields[name], want)
		}
	}
	if share, ok := fields["policy_ns_per_access"].(float64); !ok || share <= 0 {
		t.Errorf("the policies' share is %v", fields["policy_ns_per_access"])
	}
	if _, ok := fields["seconds"].(float64); !ok {
		t.Errorf("seconds is %v", fields["seconds"])
	}
	policies, _ := fields["policies"].([]any)
	for _, p := range policies {
		for _, name := range []string{"role", "module", "digest", "calls", "seconds"} {
			if _, ok := p.(map[string]any)[name]; !ok {
				t.Errorf("a policy has no %s: %v", name, p)
			}
		}
	}
	if len(policies) == 0 {
		t.Error("no policies")
	}
}

// start runs a host on a real socket with one root, until the test or the returned function ends it.
func start(t *testing.T, root string, capacity int64, change ...func(*config.Config)) (socket string, stop func()) {
	t.Helper()
	c := hosttest.Configuration(t, config.Root{Path: root, Capacity: capacity, ForPieces: true})
	c.Engine.ThreadsPerGPU = 4
	for _, f := range change {
		f(c)
	}
	h, stop := hosttest.Start(t, c)
	return h.Socket(), stop
}

func write(t *testing.T, requests [][]uint64) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "t.jsonl")
	f, err := os.Create(path)
	testenv.OK(t, err)
	defer f.Close()
	w := json.NewEncoder(f)
	for i, ids := range requests {
		q := map[string]any{"timestamp": i, "input_length": len(ids), "output_length": 0, "hash_ids": ids}
		testenv.OK(t, w.Encode(q))
	}
	return path
}

func mixture(t *testing.T, requests int) [][]uint64 {
	t.Helper()
	r, err := trace.Open("../../../examples/traces/mixed.jsonl.zst")
	testenv.OK(t, err)
	defer r.Close()
	all := make([][]uint64, requests)
	for i := range all {
		var q trace.Request
		testenv.OK(t, r.Next(&q))
		all[i] = append([]uint64{}, q.HashIDs...)
	}
	return all
}

func entryBytes(t *testing.T, s replay.Shape) int64 {
	t.Helper()
	n, err := s.EntryBytes(t.Context(), nil, nil)
	testenv.OK(t, err)
	return n
}

// play replays without errors.
func play(t *testing.T, o replay.Options) *replay.Report {
	t.Helper()
	r, err := replay.Run(t.Context(), o)
	testenv.OK(t, err)
	testenv.OK(t, r.Err())
	return r
}

// The report tells what was loaded from each level, and what was written to it.
func TestLevels(t *testing.T) {
	requests := mixture(t, 60)
	shape := replay.Shape{Ranks: 1, ChunkBytes: 16 << 10, PageBytes: 4 << 10}
	entry := entryBytes(t, shape)
	socket, _ := start(t, filepath.Join(t.TempDir(), "far"), 2000*entry, func(c *config.Config) {
		c.Roots[0].Level = 1
		c.Roots = append([]config.Root{{Path: "memory:", Capacity: 100 * entry}}, c.Roots...)
	})
	r := play(t, replay.Options{Trace: write(t, requests), Socket: socket, Shape: shape, Sessions: 2})
	if l := r.Levels; len(l) != 2 || l[0].BytesLoaded == 0 || l[0].Written == 0 || l[1].Written == 0 {
		t.Errorf("the levels of the report are %+v", l)
	}
	var table strings.Builder
	if err := r.Table(&table); err != nil || !strings.Contains(table.String(), "level 1") {
		t.Errorf("the table lacks a level (%v):\n%s", err, table.String())
	}
}
