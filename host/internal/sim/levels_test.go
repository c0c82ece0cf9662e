package sim

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
	"github.com/kvhost/kvhost/host/internal/testkit/policytest"
)

// levelGrid has one policy, the host's own admission, and write back.
func levelGrid(t testing.TB, w *Workload, pol string, capacities ...string) *LevelGrid {
	t.Helper()
	g := &LevelGrid{
		Workloads: []*Workload{w}, Writes: []Write{WriteBack}, ChunkBytes: 4096, Options: Options{Prefill: DefaultPrefill()},
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

// A trace by hand: LRU of two chunks before LRU of three.
func TestLevelsByHand(t *testing.T) {
	var requests [][]uint64
	for _, c := range "aabcaaabda" {
		requests = append(requests, []uint64{uint64(c)})
	}
	w := workload(t, requests...)
	for _, c := range []struct {
		admit string
		write Write
		want  []LevelFigures
		loads float64 // seconds
	}{
		// c evicts a, which was hit: demoted. a is hit there twice: promoted, b goes. b evicts c; d evicts a, which is
		// below; a is promoted again, b goes.
		{AdmitDefault, WriteBack, []LevelFigures{
			{Hits: 2, Loads: 2, New: 5, Promotions: 2, Covered: 1, Drops: 3},
			{Level: 1, Hits: 3, Loads: 3, Demotions: 1},
		}, 2./4 + 3},
		// c evicts a to below; a comes up, b goes down; b comes up, c goes down; d evicts a, a evicts b: both are below.
		{AdmitAll, WriteBack, []LevelFigures{
			{Hits: 3, Loads: 3, New: 4, Promotions: 3, Covered: 2},
			{Level: 1, Hits: 3, Loads: 3, Demotions: 3},
		}, 3./4 + 3},
		// a is copied at its hit, and covered when c evicts it. What comes up has been hit before, and is below.
		{AdmitDefault, WriteHits, []LevelFigures{
			{Hits: 2, Loads: 2, New: 5, Promotions: 2, Covered: 2, Drops: 3},
			{Level: 1, Hits: 3, Loads: 3, New: 1},
		}, 2./4 + 3},
		// All are stored below at once. a is promoted at its second hit there, b is hit there once; d evicts c in both.
		{AdmitDefault, WriteThrough, []LevelFigures{
			{Hits: 3, Loads: 3, New: 4, Promotions: 1, Covered: 3},
			{Level: 1, Hits: 3, Loads: 3, New: 4, Drops: 1},
		}, 3./4 + 3},
	} {
		t.Run(c.admit+", "+c.write.String(), func(t *testing.T) {
			g := levelGrid(t, w, "lru", "2", "3")
			g.ChunkBytes, g.Options.Prefill = 1000, Prefill{TokensPerSecond: 1, ChunkTokens: 2}
			g.Levels[0].BytesPerSecond, g.Levels[1].BytesPerSecond = 4000, 1000
			g.Admissions, g.Writes = []*Policy{admits(t, c.admit)}, []Write{c.write}
			r := levelOutcome(t, g).Results[0]
			hits := 0
			for n := range c.want {
				f := &c.want[n]
				f.Capacity, f.BytesLoaded = n+2, int64(f.Loads)*1000
				one := 1000 / g.Levels[n].BytesPerSecond
				f.LoadTimes = Times{one, one, one}
				f.BytesWritten = int64(f.New+f.Demotions+f.Promotions) * 1000
				hits += f.Hits
			}
			if !reflect.DeepEqual(r.Levels, c.want) {
				t.Errorf("the levels counted %+v, want %+v", r.Levels, c.want)
			}
			saved := 2 * float64(hits)
			if r.Hits != hits || r.PrefixHits != hits || r.BytesLoaded != int64(hits)*1000 || r.LoadSeconds != c.loads ||
				r.PrefillSeconds != saved || r.SavedSeconds != saved-c.loads || r.FartherSeconds != float64(hits)-c.loads {
				t.Errorf("the totals are %+v, want %d hits of which all are loaded in %g s", r, hits, c.loads)
			}
		})
	}
}

// One level is what is simulated without levels.
func TestOneLevelIsARoot(t *testing.T) {
	w := generated(t, 400)
	for _, name := range nativeNames() {
		g := levelGrid(t, w, name, "200")
		got := levelOutcome(t, g).Results[0]
		want := run(t, w, native(t, name), 200, g.Options)
		f := got.Levels[0]
		if got.Hits != want.Hits || got.PrefixHits != want.PrefixHits || f.Drops != want.Evictions || f.Shed != want.Shed ||
			f.Loads != want.PrefixHits || got.PrefillSeconds != want.SavedSeconds ||
			f.New != want.Accesses-want.Hits-want.Shed {
			t.Errorf("%s in one level: got %+v, without levels %+v", name, got, want)
		}
	}
}

// candidateLog notes what an admit policy is asked, and answers by the host's rule.
type candidateLog struct{ seen *[]abi.Candidate }

func (l candidateLog) Admit(batch []abi.Candidate, dst []bool) {
	for i := range batch {
		*l.seen = append(*l.seen, batch[i])
		dst[i] = policy.AdmitsByDefault(&batch[i])
	}
}

func logs(seen *[]abi.Candidate) []*Policy {
	return []*Policy{policyOf(policy.NativeModule("log", []abi.Role{abi.RoleAdmit}, func(guest.Info) (any, error) {
		return candidateLog{seen}, nil
	}))}
}

// A level evicts the start of a prefix that goes on, and writes through: the admit policy is asked about both.
func TestCandidatesOfPrefixes(t *testing.T) {
	var seen []abi.Candidate
	w := workload(t, []uint64{1, 2, 3}, []uint64{4, 5, 6})
	g := levelGrid(t, w, "lru", "3", "6", "6")
	g.Admissions = logs(&seen)
	moves := func(kind abi.CandidateKind) (list []string) {
		for _, c := range seen {
			if c.Kind == kind && c.From != abi.NoLevel {
				list = append(list, fmt.Sprintf("depth %d, %d to %d, flags %d", c.Depth, c.From, c.To, c.Flags))
			}
		}
		seen = nil
		return list
	}
	r := levelOutcome(t, g).Results[0]
	// The start, the middle, and the end, which nothing continues.
	want := []string{"depth 0, 0 to 1, flags 2", "depth 1, 0 to 1, flags 3", "depth 2, 0 to 1, flags 1"}
	if got := moves(abi.KindDemotion); !slices.Equal(got, want) || r.Levels[1].Demotions != 2 || r.Levels[0].Drops != 1 {
		t.Errorf("demotions asked about: got %v and %+v, want %v", got, r.Levels, want)
	}
	g.Writes = []Write{WriteThrough}
	r = levelOutcome(t, g).Results[0]
	through := moves(abi.KindNew)
	if len(through) != 12 || through[2] != "depth 1, 0 to 1, flags 1" || through[3] != "depth 1, 1 to 2, flags 5" ||
		r.Levels[1].New != 6 || r.Levels[2].New != 6 || r.Levels[0].Covered != 3 {
		t.Errorf("copies written through: got %v and %+v", through, r.Levels)
	}
}

// The admit policy is told the truth about what would move.
func TestCandidatesOfLevels(t *testing.T) {
	var seen []abi.Candidate
	w := workload(t, []uint64{1, 2}, []uint64{1}, []uint64{3}, []uint64{4}, []uint64{1}, []uint64{1, 2})
	g := levelGrid(t, w, "lru", "2", "2")
	g.Admissions = logs(&seen)
	levelOutcome(t, g)
	var got []string
	chunk := map[uint64]int{0: 0}
	for id, key := range w.keys {
		chunk[key] = id + 1
	}
	for _, c := range seen {
		got = append(got, fmt.Sprintf("%d of %d: kind %d, %d to %d, hits %d, flags %d, depth %d, request %d, time %d",
			chunk[c.Key], chunk[c.ParentKey], c.Kind, int8(c.From), c.To, c.Hits, c.Flags, c.Depth, c.Request, c.Time/1e6))
	}
	want := []string{
		"1 of 0: kind 0, -1 to 0, hits 0, flags 2, depth 0, request 1, time 0",
		"2 of 1: kind 0, -1 to 0, hits 0, flags 1, depth 1, request 1, time 0",
		"3 of 0: kind 0, -1 to 0, hits 0, flags 0, depth 0, request 3, time 2",
		"2 of 1: kind 1, 0 to 1, hits 0, flags 5, depth 1, request 0, time 2",
		"4 of 0: kind 0, -1 to 0, hits 0, flags 0, depth 0, request 4, time 3",
		"1 of 0: kind 1, 0 to 1, hits 1, flags 4, depth 0, request 0, time 3",
		"1 of 0: kind 2, 1 to 0, hits 1, flags 0, depth 0, request 0, time 4",
		"1 of 0: kind 2, 1 to 0, hits 2, flags 0, depth 0, request 0, time 5",
		"3 of 0: kind 1, 0 to 1, hits 0, flags 4, depth 0, request 0, time 5",
		"2 of 1: kind 0, -1 to 0, hits 0, flags 1, depth 1, request 6, time 5",
		"4 of 0: kind 1, 0 to 1, hits 0, flags 4, depth 0, request 0, time 5",
	}
	if !slices.Equal(got, want) {
		for _, line := range got {
			t.Log(line)
		}
		t.Errorf("got these candidates, want %q", want)
	}
}

// Chunks that come into a level are still there or have left it, and no level holds more than its capacity.
func TestLevelsAddUp(t *testing.T) {
	w := generated(t, 400)
	for _, admit := range []string{AdmitDefault, AdmitAll} {
		for _, write := range []Write{WriteBack, WriteHits, WriteThrough} {
			g := levelGrid(t, w, "sieve", "40", "200", "300")
			h, err := g.open(t.Context(), w, g.Policies[0], admits(t, admit), write)
			testenv.OK(t, err)
			lo := 0
			for i, end := range w.ends {
				if _, err := h.request(w.ids[lo:end], uint32(i)+1); err != nil {
					t.Fatal(err)
				}
				lo = int(end)
				demoted := 0
				for n := len(h.levels) - 1; n >= 0; n-- {
					l := &h.levels[n]
					f, resident := l.figures, len(l.chunkOf)-len(l.free)
					in, out := f.New+f.Demotions+f.Promotions, f.Covered+f.Drops+demoted
					if in-out != resident || out != l.evictions {
						t.Fatalf("%s, %s, request %d: level %d holds %d chunks: %+v", admit, write, i+1, n, resident, f)
					}
					demoted = f.Demotions
				}
			}
			h.close()
		}
	}
}

// Modules decide as their native twins do, in levels too.
func TestLevelsInWasmAsNative(t *testing.T) {
	w := generated(t, 300)
	dir := policytest.Dir(t, "lru", "prefix", "reuse")
	g := levelGrid(t, w, "lru", "60", "400")
	g.Writes = append(g.Writes, WriteThrough)
	g.Admissions = append(g.Admissions, reuseAdmits(policy.Config{"least": "80"}))
	g.Policies = append(g.Policies, evicts(t, "prefix"))
	want := levelOutcome(t, g).Results
	reuse, err := OpenAdmission(t.Context(), "reuse:least=80", policy.Options{Dir: dir, Cache: policytest.Cache(t)}, abi.RoleAdmit)
	testenv.OK(t, err)
	defer reuse.Close(context.Background())
	g.Admissions[1] = reuse
	for i, name := range []string{"lru", "prefix"} {
		// Fuel bounds a batch, and prefix decides by batches: it is as for the native twin.
		p, err := OpenPolicy(t.Context(), name, policy.Options{Dir: dir, Cache: policytest.Cache(t), Fuel: sandbox.Fuel{Call: 1 << 30, Record: 1 << 20}}, abi.RoleEvict)
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
	g := levelGrid(t, generated(t, 2000), "prefix", "1%", "20%")
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
	g := levelGrid(t, generated(t, 400), "lru", "2%", "10%", "50%")
	g.ChunkBytes = 64 << 20
	g.Policies = append(g.Policies, evicts(t, "arc"))
	g.Admissions = append(g.Admissions, admits(t, AdmitAll))
	g.Writes = append(g.Writes, WriteThrough)
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
	times.add([]load{{1, 0}, {2, 1}, {3, 1}})
	times.add(nil)
	times.add([]load{{1, 0}})
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
