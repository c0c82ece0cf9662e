package host_test

import (
	"context"
	"path/filepath"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/policy/plugintest"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
	"github.com/kvhost/kvhost/host/internal/replay"
	"github.com/kvhost/kvhost/host/internal/sim"
	"github.com/kvhost/kvhost/host/internal/testkit/hosttest"
	"github.com/kvhost/kvhost/host/internal/testkit/policytest"
	"github.com/kvhost/kvhost/host/kv"
)

func TestConform(t *testing.T) {
	testenv.Slow(t)
	for _, name := range []string{"recency", "spill", "thrift", "aligned"} {
		t.Run(name, func(t *testing.T) {
			r, err := plugintest.Check(t.Context(), policytest.Example(t, name), plugintest.Options{Cache: policytest.Cache(t), Fuel: sandbox.Fuel{Time: time.Hour}})
			testenv.OK(t, err)
			for i := range r.Findings {
				t.Error(&r.Findings[i])
			}
			for _, u := range r.Calls {
				t.Logf("%-12s %4.1f %% of its fuel in the dearest call", u.Export, 100*u.Share())
			}
		})
	}
}

// start runs a host with these roots and policies on a real socket, until the returned function ends it.
func start(t *testing.T, roots []config.Root, modules ...string) (socket string, stop func()) {
	t.Helper()
	c := hosttest.Configuration(t, roots...)
	c.Engine.ThreadsPerGPU = 2
	for _, m := range modules {
		c.Policies = append(c.Policies, config.Policy{Module: m, OnFault: config.OnFaultStop})
	}
	h, stop := hosttest.Start(t, c)
	return h.Socket(), stop
}

const mixed = "../examples/traces/mixed.jsonl.zst"

// All three decide for one host with two roots: chunks are stored, evicted, loaded and compared byte by byte, and found
// again after a restart under the names that spill gave.
func TestStoreRoundTrip(t *testing.T) {
	testenv.Slow(t)
	modules := []string{policytest.Example(t, "spill"), policytest.Example(t, "aligned")}
	for _, evict := range []string{"recency", "thrift"} {
		t.Run(evict, func(t *testing.T) {
			roots := []config.Root{{Path: t.TempDir(), Capacity: 8 << 20}, {Path: t.TempDir(), Capacity: 8 << 20}}
			shape := replay.Shape{Ranks: 2, ChunkBytes: 12_000, PageBytes: 1500, Layers: 2} // pages of no sector's size
			socket, stop := start(t, roots, append(modules, policytest.Example(t, evict))...)
			play := func(socket string, limit int) *replay.Report {
				t.Helper()
				r, err := replay.Run(t.Context(), replay.Options{Trace: mixed, Socket: socket, Shape: shape, Sessions: 2, Limit: limit})
				testenv.OK(t, err)
				if r.MismatchedBytes != 0 || r.FailedLoads != 0 || r.FailedStores != 0 {
					t.Errorf("%d wrong bytes, %d failed loads, %d failed stores", r.MismatchedBytes, r.FailedLoads,
						r.FailedStores)
				}
				return r
			}
			first := play(socket, 120)
			names := map[string]bool{}
			for _, p := range first.Policies {
				// A layout is asked for before the replay begins
				names[p.Module] = (p.Calls > 0 || p.Role == "layout") && p.Faults == 0
			}
			if !names[evict] || !names["spill"] || !names["aligned"] {
				t.Errorf("not all decided, or some failed: %+v", first.Policies)
			}
			if first.Hits == 0 || first.Stored*int64(shape.Ranks)*12_000 < 16<<20 {
				t.Errorf("%d hits, %d stored: too few to have evicted", first.Hits, first.Stored)
			}
			stop()
			for i, r := range roots {
				if ranks, err := filepath.Glob(filepath.Join(r.Path, "r[01]", "*", "*", "*.g0")); err != nil ||
					len(ranks) == 0 {
					t.Errorf("root %d has no files that spill named: %v", i, err)
				}
			}
			socket, _ = start(t, roots, append(modules, policytest.Example(t, evict))...)
			again := play(socket, 20)
			if again.Hits == 0 {
				t.Errorf("nothing was found after the restart: %+v", again)
			}
		})
	}
}

func miss(t *testing.T, w *sim.Workload, path string, share int) *sim.Result {
	t.Helper()
	m, err := policy.Open(t.Context(), path, policy.Options{Cache: policytest.Cache(t)})
	testenv.OK(t, err)
	defer m.Close(context.Background())
	r, err := w.Run(t.Context(), m, nil, w.Unique()*share/100, sim.Options{Prefill: sim.DefaultPrefill(), ChunkUnits: 1})
	testenv.OK(t, err)
	return &r
}

// On the example trace recency misses as often as lru, and thrift less often.
func TestMissRatios(t *testing.T) {
	testenv.Slow(t)
	w, err := sim.Load(t.Context(), mixed)
	testenv.OK(t, err)
	lruModule := filepath.Join(policytest.Dir(t, "lru"), "lru.wasm")
	for _, share := range []int{5, 10} {
		lru, recency, thrift := miss(t, w, lruModule, share), miss(t, w, policytest.Example(t, "recency"), share),
			miss(t, w, policytest.Example(t, "thrift"), share)
		t.Logf("%2d %%: lru %.4f, recency %.4f, thrift %.4f", share, lru.MissRatio, recency.MissRatio, thrift.MissRatio)
		if recency.MissRatio != lru.MissRatio {
			t.Errorf("%d %%: recency misses %.6f, lru %.6f", share, recency.MissRatio, lru.MissRatio)
		}
		if thrift.MissRatio >= lru.MissRatio {
			t.Errorf("%d %%: thrift misses %.4f, lru %.4f", share, thrift.MissRatio, lru.MissRatio)
		}
	}
}

// spill fills the fast root first, sends large entries to the mount as the fast root fills, and everything when it is
// full.
func TestSpillFollowsTheFacts(t *testing.T) {
	m, err := policy.Open(t.Context(), policytest.Example(t, "spill"), policy.Options{Cache: policytest.Cache(t)})
	testenv.OK(t, err)
	defer m.Close(context.Background())
	p, err := m.NewPlace(t.Context(), policy.PlaceOptions{})
	testenv.OK(t, err)
	defer p.Close()
	testenv.OK(t, p.Namespace(0, "model=a\n"))
	const gib = 1 << 30
	share := func(free uint64, units uint32, flags uint32) (onMount float64) {
		p.SetRoots([]abi.RootFacts{
			{ID: 5, Flags: abi.RootWritable, Capacity: 1000 * gib, Free: 900 * gib, ReadBps: gib, WriteBps: gib},
			{ID: 2, Flags: flags, Capacity: 100 * gib, Free: free, ReadBps: 6 * gib, WriteBps: 3 * gib},
		})
		n := 0
		for i := range 2000 {
			q := abi.PlaceQuery{KeyLen: 8, Size: units}
			q.Key[0], q.Key[1], q.Key[5] = byte(i), byte(i>>8), 7
			_, root, err := p.Path(&q, nil)
			if err != nil || root > 1 {
				t.Fatalf("root %d, %v", root, err)
			}
			if root == 0 {
				n++
			}
		}
		return float64(n) / 2000
	}
	for _, c := range []struct {
		what        string
		free        uint64
		units       uint32
		flags       uint32
		least, most float64
	}{
		{"roomy", 50 * gib, 4096, abi.RootWritable, 0, 0},
		{"half of the reserve, small entries", 10 * gib, 1, abi.RootWritable, 0.4, 0.6},
		{"half of the reserve, large entries", 10 * gib, 4096, abi.RootWritable, 1, 1},
		{"nearly all of the reserve, large entries", 19 * gib, 4096, abi.RootWritable, 0.15, 0.25},
		{"full", 0, 1, abi.RootWritable, 1, 1},
		{"closed", 50 * gib, 1, 0, 1, 1},
	} {
		if got := share(c.free, c.units, c.flags); got < c.least || got > c.most {
			t.Errorf("%s: %.3f go to the mount, want %v to %v", c.what, got, c.least, c.most)
		}
	}
}

// Each block of a chunk starts on a sector and is contiguous.
func TestAlignedBlocks(t *testing.T) {
	m, err := policy.Open(t.Context(), policytest.Example(t, "aligned"), policy.Options{Cache: policytest.Cache(t)})
	testenv.OK(t, err)
	defer m.Close(context.Background())
	l, err := m.NewLayout(t.Context(), policy.LayoutOptions{})
	testenv.OK(t, err)
	defer l.Close()
	g := kv.Geometry{Blocks: 5, Planes: []kv.Plane{{Layer: 1, PageBytes: 1001},
		{Layer: 0, Part: 1, PageBytes: 700}, {Layer: 0, PageBytes: 3000}}}
	plan, err := l.Plan(0, 0, "model=a\n", g)
	testenv.OK(t, err)
	var at int64
	for i, s := range plan.Segments() {
		block, plane := uint32(i/3), []uint32{2, 1, 0}[i%3]
		first, _ := plan.SegmentExtents(i)
		off := plan.Extents()[first].Off
		if plane == 2 {
			at = (at + 4095) &^ 4095
		}
		if s.Block != block || s.Blocks != 1 || s.Plane != plane || off != at {
			t.Errorf("segment %d: %+v at %d, want block %d of plane %d at %d", i, s, off, block,
				plane, at)
		}
		at += int64(s.PageLen)
	}
	if n := l.Stats().Faults; n != 0 {
		t.Errorf("%d faults", n)
	}
}
