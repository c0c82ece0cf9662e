package sim

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"reflect"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/memfs"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/testkit/policytest"
	"github.com/kvhost/kvhost/host/internal/trace"
)

// levelGrid has one policy, the host's own admission, and write back.
func levelGrid(t testing.TB, w *Workload, pol string, capacities ...string) *LevelGrid {
	t.Helper()
	g := &LevelGrid{
		Workloads: []*Workload{w}, Writes: []store.Write{store.WriteBack}, ChunkBytes: 4096, Workers: 2, Options: Options{Prefill: DefaultPrefill()},
	}
	var costs []string
	for n := range capacities {
		costs = append(costs, fmt.Sprintf("%d=%d", n, 4-n))
		capacities[n] = fmt.Sprintf("%d=%s", n, capacities[n])
	}
	var err error
	g.Levels, err = ParseLevels(capacities, costs)
	testenv.OK(t, err)
	g.Policies, g.Admissions = []*Policy{evicts(t, pol)}, []*Policy{admits(t, AdmitDefault)}
	return g
}

func admits(t testing.TB, text string) *Policy {
	t.Helper()
	a, err := OpenAdmission(context.Background(), text, policy.Options{}, abi.RoleAdmit)
	testenv.OK(t, err)
	return a
}

func levelOutcome(t testing.TB, g *LevelGrid) *LevelOutcome {
	t.Helper()
	o, err := g.Run(context.Background())
	testenv.OK(t, err)
	return o
}

// TestCopiesTakeTime: of ten chunks that are written through, two copies at a time begin when the level or the bandwidth has moved
// those before, and wait while a request loads.
func TestCopiesTakeTime(t *testing.T) {
	stores := []uint64{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}
	for _, c := range []struct {
		name      string
		bandwidth int64
		requests  []trace.Request
		want      int // copies that have begun
	}{
		{"at the speed of the level", 0, []trace.Request{{HashIDs: stores}, {Timestamp: 2500}}, 4},
		{"at the bandwidth", 2048, []trace.Request{{HashIDs: stores}, {Timestamp: 4500}}, 4},
		{"after a load of 2 s", 0, []trace.Request{{HashIDs: stores}, {HashIDs: stores[:8]}, {Timestamp: 2500}}, 2},
	} {
		w, err := fromRequests("made", c.requests)
		testenv.OK(t, err)
		g := levelGrid(t, w, "lru", "10", "10")
		g.Levels[0].BytesPerSecond, g.Levels[1].BytesPerSecond = 4*4096e6, 4096
		if len(c.requests) > 2 {
			g.Levels[0].Latency = 2 * time.Second
		}
		g.Bandwidth, g.Writes = c.bandwidth, []store.Write{store.WriteThrough}
		if r := levelOutcome(t, g).Results[0]; r.Levels[1].New != c.want || r.Levels[0].New != 10 {
			t.Errorf("%s: %d copies of %d chunks have begun, want %d of 10", c.name, r.Levels[1].New, r.Levels[0].New, c.want)
		}
	}
}

// TestOneLevelIsARoot: one level has about as many hits as the same root without levels, in which requests touch chunks after a gap, too.
func TestOneLevelIsARoot(t *testing.T) {
	w := generated(t, 400)
	for _, name := range []string{"lru", "prefix", "s3fifo"} {
		g := levelGrid(t, w, name, "200")
		got := levelOutcome(t, g).Results[0]
		want := run(t, w, native(t, name), 200, g.Options)
		if math.Abs(got.PrefixHitRatio-want.PrefixHitRatio) > 0.03 || got.Levels[0].Hits != got.PrefixHits {
			t.Errorf("%s in one level: got %+v, without levels %+v", name, got, want)
		}
	}
}

// TestSharesOfAStore: levels have the shares of hits that those of a store with its background work have, whose files are in memory and
// whose copies have all the time that they need.
func TestSharesOfAStore(t *testing.T) {
	w := generated(t, 400)
	for _, write := range []store.Write{store.WriteBack, store.WriteThrough} { // with WriteHits a store's own runs differ by 0.013
		g := levelGrid(t, w, "lru", "300", "600")
		for n := range g.Levels {
			g.Levels[n].BytesPerSecond = 1e15
		}
		g.Writes = []store.Write{write}
		want := levelOutcome(t, g).Results[0]
		g.Workers = 0
		h, err := g.open(t.Context(), w, g.Policies[0], g.Admissions[0], write)
		testenv.OK(t, err)
		cfg := h.cfg
		cfg.Stepped, cfg.Now, cfg.Log = false, nil, nil
		for n := range cfg.Roots {
			files, err := memfs.New(2*cfg.Roots[n].Capacity+32<<20, nil)
			testenv.OK(t, err)
			t.Cleanup(func() { testenv.OK(t, files.Close()) })
			files.Start(nil)
			cfg.Roots[n].FS = files
		}
		testenv.OK(t, h.close())
		h.store, err = store.Open(t.Context(), cfg)
		testenv.OK(t, err)
		h.ns, err = h.store.Namespace(t.Context(), &h.text)
		testenv.OK(t, err)
		_, _, err = w.play(t.Context(), &g.Options, "lru", func(ids []uint32, number uint32) (int, error) {
			hits, err := h.request(t.Context(), ids, number)
			return hits, errors.Join(err, h.store.Settle(t.Context()))
		})
		testenv.OK(t, errors.Join(err, h.close()))
		for n := range h.levels {
			share := func(hits int) float64 { return float64(hits) / float64(w.Accesses()) }
			if got, want := share(h.levels[n].figures.Hits), share(want.Levels[n].Hits); math.Abs(got-want) > 0.01 || got == 0 {
				t.Errorf("%s: level %d of a store has %.4f of the accesses, of a simulated one %.4f", writes[write], n, got, want)
			}
		}
	}
}

// TestLevelsAddUp: chunks that come into a level are still there or have left it, and no level holds more than its capacity.
func TestLevelsAddUp(t *testing.T) {
	w := generated(t, 150)
	for _, admit := range []string{AdmitDefault, AdmitAll} {
		for _, write := range []store.Write{store.WriteBack, store.WriteHits, store.WriteThrough} {
			g := levelGrid(t, w, "sieve", "20", "80", "120")
			h, err := g.open(t.Context(), w, g.Policies[0], admits(t, admit), write)
			testenv.OK(t, err)
			_, _, err = w.play(t.Context(), &g.Options, "sieve", func(ids []uint32, number uint32) (int, error) {
				return h.request(t.Context(), ids, number)
			})
			testenv.OK(t, err)
			var r LevelResult
			r.count(h, g)
			for n, f := range r.Levels {
				resident := h.store.Stats().Roots[n].Entries
				if in, out := f.New+f.Demotions+f.Promotions, f.Covered+f.Drops; in-out != resident || resident > f.Capacity || in == 0 {
					t.Errorf("%s, %s: level %d holds %d chunks: %+v", admit, writes[write], n, resident, f)
				}
			}
			testenv.OK(t, h.close())
		}
	}
}

// Modules decide as their native twins do, in levels too.
func TestLevelsInWasmAsNative(t *testing.T) {
	w := generated(t, 120)
	dir := policytest.Dir(t, "lru", "prefix", "reuse")
	g := levelGrid(t, w, "lru", "60", "400")
	g.Writes = append(g.Writes, store.WriteThrough)
	g.Admissions = append(g.Admissions, reuseAdmits(policy.Config{"least": "80"}))
	g.Policies = append(g.Policies, evicts(t, "prefix"))
	want := levelOutcome(t, g).Results
	reuse, err := OpenAdmission(t.Context(), "reuse:least=80", policy.Options{Dir: dir, Cache: policytest.Cache(t)}, abi.RoleAdmit)
	testenv.OK(t, err)
	defer reuse.Close(context.Background())
	g.Admissions[1] = reuse
	for i, name := range []string{"lru", "prefix"} {
		// Fuel bounds a batch, and prefix decides by batches: it is as for the native twin.
		p, err := OpenPolicy(t.Context(), name, policy.Options{Dir: dir, Cache: policytest.Cache(t), Fuel: sandbox.Fuel{Call: 1 << 30, Record: 1 << 20}})
		testenv.OK(t, err)
		defer p.Close(context.Background())
		g.Policies[i] = p
	}
	for i, got := range levelOutcome(t, g).Results {
		if !reflect.DeepEqual(got.Levels, want[i].Levels) || got.Levels[1].Demotions+got.Levels[1].New == 0 {
			t.Errorf("%s, %s, %s: %+v\nnatively %+v", got.Policy, got.Admit, got.Write, got.Levels, want[i].Levels)
		}
	}
}

// Where a policy evicts prefixes from their end, the host's rule keeps nothing that was not hit, as nothing continues what is
// evicted. reuse keeps nearly all that is used again, and writes less than keeping everything.
func TestReusePays(t *testing.T) {
	g := levelGrid(t, generated(t, 700), "prefix", "1%", "20%")
	g.Admissions = append(g.Admissions, admits(t, AdmitAll), reuseAdmits(nil))
	r := levelOutcome(t, g).Results
	rule, everything, reuse := r[0], r[1], r[2]
	if reuse.Hits < rule.Hits || float64(reuse.Hits) < 0.97*float64(everything.Hits) ||
		float64(reuse.Levels[1].BytesWritten) > 0.93*float64(everything.Levels[1].BytesWritten) {
		t.Errorf("hits: rule %d, reuse %d, all %d; written farther away: %d, %d, %d", rule.Hits, reuse.Hits,
			everything.Hits, rule.Levels[1].BytesWritten, reuse.Levels[1].BytesWritten, everything.Levels[1].BytesWritten)
	}
}

func TestGoldenLevelTable(t *testing.T) {
	g := levelGrid(t, generated(t, 150), "lru", "2%", "10%", "25%")
	g.ChunkBytes = 64 << 20
	g.Policies = append(g.Policies, evicts(t, "arc"))
	g.Admissions = append(g.Admissions, admits(t, AdmitAll))
	g.Writes = append(g.Writes, store.WriteThrough)
	g.Levels[2].Policy = evicts(t, "sieve")
	var table bytes.Buffer
	testenv.OK(t, levelOutcome(t, g).WriteTable(&table))
	golden(t, "testdata/levels.txt", table.Bytes())
}

func TestParseLevels(t *testing.T) {
	levels, err := ParseLevels([]string{"1=10%", "0=5"}, []string{"0=50", "1=0.5:30ms"})
	if err != nil || len(levels) != 2 || levels[1].Latency != 30*time.Millisecond || levels[0].Capacity.String() != "5" || levels[1].BytesPerSecond != 5e8 {
		t.Errorf("two levels parse as %+v, %v", levels, err)
	}
	for _, c := range []struct{ capacities, costs []string }{
		{[]string{"0=5", "2=5"}, []string{"0=1", "2=1"}},
		{[]string{"0=5", "0=6"}, []string{"0=1"}},
		{[]string{"0=5"}, []string{"0=1", "1=1"}},
		{[]string{"0=5"}, []string{"0=0"}},
		{[]string{"0=5"}, []string{"0=-1"}},
		{[]string{"0=5"}, []string{"0=Inf"}},
		{[]string{"0=5"}, []string{"0=NaN"}},
		{[]string{"0=5"}, []string{"0=1:x"}},
		{[]string{"0=5"}, []string{"0=1:-1ms"}},
		{[]string{"0=5"}, nil},
		{[]string{"8=5"}, []string{"8=1"}},
		{[]string{"-1=5"}, nil},
		{[]string{"x=5"}, nil},
		{[]string{"5"}, nil},
	} {
		if _, err := ParseLevels(c.capacities, c.costs); !errors.Is(err, ErrLevel) {
			t.Errorf("capacities %v at speeds %v: got %v, want %v", c.capacities, c.costs, err, ErrLevel)
		}
	}
	if _, err := ParseLevels([]string{"0=x"}, []string{"0=1"}); !errors.Is(err, ErrCapacity) {
		t.Errorf("a level without a capacity: got %v", err)
	}
	if _, err := ParseWrite("around"); !errors.Is(err, ErrLevel) {
		t.Errorf("an unknown way to write: got %v", err)
	}
	if _, err := OpenAdmission(t.Context(), "x:=1", policy.Options{}); !errors.Is(err, ErrPolicy) {
		t.Errorf("an admit policy with bad settings: got %v", err)
	}
	g := levelGrid(t, workload(t, []uint64{1}), Belady, "5")
	if _, err := g.Run(t.Context()); !errors.Is(err, ErrPolicy) {
		t.Errorf("the optimum in levels: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := levelGrid(t, generated(t, 100), "lru", "5").Run(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("after cancelling: %v", err)
	}
}

// TestLoadTimes: a request waits for the latency of each level once, and for all bytes.
func TestLoadTimes(t *testing.T) {
	g := &LevelGrid{ChunkBytes: 1000, Levels: []Level{{BytesPerSecond: 1e6}, {BytesPerSecond: 1e5, Latency: time.Second}}}
	times := newLevelTimes(g)
	times.add([]int{1, 2})
	times.add([]int{0, 0})
	times.add([]int{1, 0})
	sum, all := timesOf(times.all)
	if want := (Times{Mean: (0.001 + 1.021) / 2, Median: 1.021, P99: 1.021}); math.Abs(sum-1.022) > 1e-9 || math.Abs(all.Mean-want.Mean) > 1e-9 ||
		math.Abs(all.P99-want.P99) > 1e-9 || math.Abs(all.Median-want.Median) > 1e-9 {
		t.Errorf("%g s in all, %+v, want 1.022 and %+v", sum, all, want)
	}
	for n, want := range []float64{0.002, 1.02} {
		if sum, _ := timesOf(times.of[n]); math.Abs(sum-want) > 1e-9 {
			t.Errorf("level %d takes %g s, want %g", n, sum, want)
		}
	}
	near, _ := timesOf(times.nearest)
	far, _ := timesOf(times.farthest)
	if math.Abs(near-0.004) > 1e-9 || math.Abs(far-2.04) > 1e-9 {
		t.Errorf("%g s from the nearest level and %g from the farthest, want 0.004 and 2.04", near, far)
	}
}
