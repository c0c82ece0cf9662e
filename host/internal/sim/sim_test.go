package sim

import (
	"bytes"
	"context"
	"encoding/csv"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/testkit/policytest"
	"github.com/kvhost/kvhost/host/internal/trace"
	"github.com/kvhost/kvhost/plugins/lru"
)

// fromRequests is a workload of requests in memory.
func fromRequests(name string, requests []trace.Request) (*Workload, error) {
	i := 0
	return read(context.Background(), name, func(r *trace.Request) error {
		if i == len(requests) {
			return io.EOF
		}
		*r = requests[i]
		i++
		return nil
	})
}

// generated is the begin of the example trace: conversations, agents and one-shot prompts.
func generated(t testing.TB, requests int) *Workload {
	t.Helper()
	r, err := trace.Open("../../../examples/traces/mixed.jsonl.zst")
	testenv.OK(t, err)
	defer r.Close()
	w, err := read(t.Context(), "generated", func(q *trace.Request) error {
		if requests--; requests < 0 {
			return io.EOF
		}
		return r.Next(q)
	})
	testenv.OK(t, err)
	return w
}

func workload(t testing.TB, requests ...[]uint64) *Workload {
	t.Helper()
	var all []trace.Request
	for i, ids := range requests {
		all = append(all, trace.Request{Timestamp: int64(i), HashIDs: ids})
	}
	w, err := fromRequests("made", all)
	testenv.OK(t, err)
	return w
}

func run(t testing.TB, w *Workload, m *policy.Module, capacity int, o Options) Result {
	t.Helper()
	r, err := w.Run(context.Background(), m, nil, capacity, o)
	testenv.OK(t, err)
	return r
}

func TestWorkload(t *testing.T) {
	w := workload(t, []uint64{1, 2, 3}, nil, []uint64{1, 2, 1 << 40}, []uint64{7})
	if w.Requests() != 4 || w.Accesses() != 7 || w.Unique() != 5 {
		t.Errorf("the workload has %d requests, %d accesses, %d chunks, want 4, 7, 5", w.Requests(), w.Accesses(), w.Unique())
	}
	if !slices.Equal(w.ids, []uint32{0, 1, 2, 0, 1, 3, 4}) || !slices.Equal(w.depths, []uint32{0, 1, 2, 2, 0}) {
		t.Errorf("its chunks are numbered %v with depths %v", w.ids, w.depths)
	}
	if !slices.Equal(w.parents, []uint32{abi.None, 0, 1, 1, abi.None}) {
		t.Errorf("parents %v", w.parents)
	}
	if w.firstChild[1] != 3 || w.sibling[3] != 2 || w.sibling[2] != abi.None {
		t.Errorf("children %v, siblings %v", w.firstChild, w.sibling)
	}
	if _, err := fromRequests("none", []trace.Request{{}}); !errors.Is(err, ErrTrace) {
		t.Errorf("a trace without chunks: %v", err)
	}
}

// One request after the other by hand: LRU of three chunks.
func TestCounts(t *testing.T) {
	w := workload(t, []uint64{1, 2, 3}, []uint64{1, 2}, []uint64{1, 4}, []uint64{2, 3}, []uint64{1, 2, 3})
	r := run(t, w, native(t, "lru"), 3, Options{Prefill: Prefill{TokensPerSecond: 1, ChunkTokens: 1}})
	// 1 2 3 miss; 1 2 hit; 1 hits, 4 evicts 3; 2 hits, 3 evicts 1; 1 evicts 4, 2 3 hit.
	if r.Hits != 4+2 || r.Evictions != 3 || r.Accesses != 12 {
		t.Errorf("%d hits, %d evictions, %d accesses", r.Hits, r.Evictions, r.Accesses)
	}
	if r.PrefixHits != 4 || r.SavedSeconds != 4 || r.RecomputeSeconds != 12 {
		t.Errorf("%d prefix hits, %.0f s of %.0f s saved", r.PrefixHits, r.SavedSeconds, r.RecomputeSeconds)
	}
	if math.Abs(r.MissRatio-0.5) > 1e-12 || math.Abs(r.PrefixHitRatio-4.0/12) > 1e-12 {
		t.Errorf("miss ratio %f, prefix hit ratio %f", r.MissRatio, r.PrefixHitRatio)
	}
}

func TestPrefillModel(t *testing.T) {
	costs := Prefill{TokensPerSecond: 100, DoubleAt: 1000, ChunkTokens: 500}.upTo(2)
	// The mean token of the first 500 stands at 250, of the second at 750.
	if want := 5 * 1.25; math.Abs(costs[1]-want) > 1e-9 {
		t.Errorf("the first chunk costs %f s, want %f", costs[1], want)
	}
	if want := 5 * 1.75; math.Abs(costs[2]-costs[1]-want) > 1e-9 {
		t.Errorf("the second chunk costs %f s, want %f", costs[2]-costs[1], want)
	}
}

// recorder records the events of a policy.
type recorder struct {
	log     *[]string
	victims []uint32
}

func (r *recorder) Events(batch []abi.Event) {
	for i := range batch {
		e := &batch[i]
		if e.Op == abi.OpRequestEnd {
			*r.log = append(*r.log, fmt.Sprintf("%s of request %d", e.Op, e.RequestEnd().Request))
			continue
		}
		*r.log = append(*r.log, fmt.Sprintf("%s slot %d parent %d depth %d request %d", e.Op, int32(e.Slot),
			int32(e.Parent), e.Depth, e.Request))
	}
}

func (r *recorder) Victims(ask abi.Ask, dst []uint32) int {
	*r.log = append(*r.log, fmt.Sprintf("ask %d bytes", ask.Bytes))
	n := copy(dst, r.victims)
	r.victims = r.victims[n:]
	return n
}

func record(t *testing.T, w *Workload, capacity int, o Options, victims ...uint32) (Result, []string) {
	t.Helper()
	var log []string
	m := policy.NativeModule("recorder", []abi.Role{abi.RoleEvict}, func(guest.Info) (any, error) {
		return &recorder{&log, victims}, nil
	})
	return run(t, w, m, capacity, o), log
}

func TestEventOrder(t *testing.T) {
	for _, c := range []struct {
		name    string
		w       *Workload
		o       Options
		victims []uint32
		shed    int
		want    []string
	}{
		{"a prefix that goes on", workload(t, []uint64{1, 2}, []uint64{1, 3}), Options{ChunkUnits: 4}, []uint32{1}, 0, []string{
			"insert slot 0 parent -1 depth 0 request 1", "insert slot 1 parent 0 depth 1 request 1",
			"request_end of request 1",
			"touch slot 0 parent -1 depth 0 request 2", "ask 16384 bytes", "remove slot 1 parent -1 depth 1 request 2",
			"insert slot 1 parent 0 depth 1 request 2", "request_end of request 2",
		}},
		{"the parent makes room and comes back", workload(t, []uint64{1, 2}, []uint64{3}, []uint64{1, 2}), Options{},
			[]uint32{0, 0}, 0, []string{
				"insert slot 0 parent -1 depth 0 request 1", "insert slot 1 parent 0 depth 1 request 1",
				"request_end of request 1",
				"ask 4096 bytes", "remove slot 0 parent -1 depth 0 request 2",
				"insert slot 0 parent -1 depth 0 request 2",
				"request_end of request 2",
				"ask 4096 bytes", "remove slot 0 parent -1 depth 0 request 3",
				"insert slot 0 parent -1 depth 0 request 3",
				"link slot 1 parent 0 depth 1 request 3",
				"touch slot 1 parent 0 depth 1 request 3", "request_end of request 3",
			}},
		{"the chunk before makes room", workload(t, []uint64{1, 2}, []uint64{3, 4}), Options{}, []uint32{0, 0}, 0,
			[]string{
				"insert slot 0 parent -1 depth 0 request 1", "insert slot 1 parent 0 depth 1 request 1",
				"request_end of request 1",
				"ask 4096 bytes", "remove slot 0 parent -1 depth 0 request 2",
				"insert slot 0 parent -1 depth 0 request 2",
				"ask 4096 bytes", "remove slot 0 parent -1 depth 0 request 2",
				"insert slot 0 parent -1 depth 1 request 2",
				"request_end of request 2",
			}},
		{"nothing to free", workload(t, []uint64{1, 2}, []uint64{3}, []uint64{2}), Options{}, nil, 1, []string{
			"insert slot 0 parent -1 depth 0 request 1", "insert slot 1 parent 0 depth 1 request 1",
			"request_end of request 1",
			"ask 4096 bytes", "request_end of request 2",
			"touch slot 1 parent -1 depth 0 request 3", "request_end of request 3",
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r, log := record(t, c.w, 2, c.o, c.victims...)
			if !slices.Equal(log, c.want) {
				for i, line := range log {
					t.Logf("%d %s", i, line)
				}
				t.Errorf("got these events, want %q", c.want)
			}
			if r.Shed != c.shed {
				t.Errorf("%d chunks were not stored, want %d", r.Shed, c.shed)
			}
		})
	}
}

func TestBeladyIsTheBest(t *testing.T) {
	w := generated(t, 400)
	ctx := context.Background()
	for _, capacity := range []int{50, 500, w.Unique(), 2 * w.Unique()} {
		best, err := w.RunBelady(ctx, capacity, Options{})
		testenv.OK(t, err)
		for _, name := range nativeNames() {
			if r := run(t, w, native(t, name), capacity, Options{}); r.Hits > best.Hits {
				t.Errorf("%s hits %d times at %d chunks, belady %d", name, r.Hits, capacity, best.Hits)
			}
		}
		if all, _ := w.RunInfinite(ctx, Options{}); best.Hits > all.Hits || capacity >= w.Unique() &&
			best.Hits != all.Hits || all.Hits != w.Accesses()-w.Unique() {
			t.Errorf("belady hits %d times at %d chunks, without limit there are %d hits", best.Hits, capacity,
				all.Hits)
		}
	}
}

// Belady equals a search for each next use.
func TestBeladyAgainstLookingAhead(t *testing.T) {
	w := generated(t, 60)
	const capacity = 40
	resident := map[uint32]bool{}
	hits := 0
	for i, id := range w.ids {
		if resident[id] {
			hits++
			continue
		}
		if len(resident) == capacity {
			victim, farthest := uint32(0), -1
			for r := range resident {
				next := len(w.ids) + int(r)
				for j, later := range w.ids[i:] {
					if later == r {
						next = i + j
						break
					}
				}
				if next > farthest {
					victim, farthest = r, next
				}
			}
			delete(resident, victim)
		}
		resident[id] = true
	}
	r, err := w.RunBelady(context.Background(), capacity, Options{})
	if err != nil || r.Hits != hits {
		t.Errorf("%d hits, want %d (%v)", r.Hits, hits, err)
	}
}

func TestCapacities(t *testing.T) {
	w := workload(t, []uint64{1, 2, 3, 4, 5, 6, 7}, []uint64{8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19})
	for text, want := range map[string]int{
		"10%": 1, "50%": 9, "100%": 19, "99.999%": 18, "5": 5, "1000": 1000, "64KiB": 4, "1MiB": 64, "70000B": 4,
		"0.5MiB": 32,
	} {
		c, err := ParseCapacity(text)
		if err != nil {
			t.Errorf("parsing %s: %v", text, err)
			continue
		}
		if got, err := c.Chunks(w, 16<<10); got != want || err != nil || c.String() != text {
			t.Errorf("%s is %d chunks, want %d (%v)", text, got, want, err)
		}
	}
	for _, text := range []string{"", "%", "0%", "-1%", "1/3%", "1e3%", "0", "-4", "x", "4x", "1.5", "-1GiB", "NaNGiB",
		"99999999999999TiB", "5000000000"} {
		if _, err := ParseCapacity(text); !errors.Is(err, ErrCapacity) {
			t.Errorf("parsing %q: got %v, want %v", text, err, ErrCapacity)
		}
	}
	for _, text := range []string{"1%", "4KiB"} {
		c, err := ParseCapacity(text)
		testenv.OK(t, err)
		if _, err := c.Chunks(w, 16<<10); !errors.Is(err, ErrCapacity) {
			t.Errorf("%s of 19 chunks: got %v, want %v", text, err, ErrCapacity)
		}
	}
	for text, want := range map[string]int{"50%": 12, "100%": 26, "5": 7, "64KiB": 5} {
		c, err := ParseCapacity(text)
		if err == nil {
			c, err = c.Compressed(1.4)
		}
		testenv.OK(t, err)
		if got, err := c.Chunks(w, 16<<10); got != want || err != nil {
			t.Errorf("%s at a ratio of 1.4 is %d chunks, want %d (%v)", text, got, want, err)
		}
	}
	for _, ratio := range []float64{0, 0.9, 101, math.NaN(), math.Inf(1)} {
		if _, err := (Capacity{}).Compressed(ratio); !errors.Is(err, ErrCapacity) {
			t.Errorf("a ratio of %g: %v", ratio, err)
		}
	}
	if bytes, units, err := ParseChunkBytes("16.5KiB"); bytes != 16896 || units != 5 || err != nil {
		t.Errorf("16.5KiB is %d bytes, %d units (%v)", bytes, units, err)
	}
	if _, _, err := ParseChunkBytes("10%"); !errors.Is(err, ErrCapacity) {
		t.Errorf("a share as a chunk's size: %v", err)
	}
}

func TestOpenPolicy(t *testing.T) {
	ctx := context.Background()
	opt := policy.Options{Dir: policytest.Dir(t, "s3fifo"), Cache: policytest.Cache(t)}
	for text, label := range map[string]string{"belady": "belady", "infinite": "infinite", "s3fifo.wasm:small=20": "s3fifo small=20"} {
		p, err := OpenPolicy(ctx, text, opt)
		if err != nil || p.Label != label || p.Text != text {
			t.Errorf("opening %s: got %+v and %v, want the label %q", text, p, err, label)
			continue
		}
		defer p.Close(ctx)
	}
	for _, text := range []string{"s3fifo:small=20,x", "s3fifo:=1"} {
		if _, err := OpenPolicy(ctx, text, opt); !errors.Is(err, ErrPolicy) {
			t.Errorf("opening %s: got %v, want %v", text, err, ErrPolicy)
		}
	}
}

func TestLoad(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.jsonl")
	text := `{"timestamp": 5, "input_length": 1, "output_length": 1, "hash_ids": [4, 5]}` + "\n"
	testenv.OK(t, os.WriteFile(path, []byte(text), 0o600))
	w, err := Load(context.Background(), path)
	if err != nil || w.Name != "a" || w.Unique() != 2 || w.times[0] != 5e6 {
		t.Errorf("loading a trace of two chunks: got %+v, %v", w, err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := Load(ctx, path); !errors.Is(err, context.Canceled) {
		t.Errorf("after cancelling: %v", err)
	}
}

// eventLog is lru and keeps the events.
type eventLog struct {
	*lru.Policy
	events []abi.Event
}

func (r *eventLog) Events(batch []abi.Event) {
	r.events = append(r.events, batch...)
	r.Policy.Events(batch)
}

// The simulator has its own tables for the host's side of a policy. Its events keep the contract all the same.
func TestEventsKeepTheContract(t *testing.T) {
	w := generated(t, 500)
	r := &eventLog{}
	m := policy.NativeModule("eventLog", []abi.Role{abi.RoleEvict}, func(i guest.Info) (_ any, err error) {
		r.Policy, err = lru.New(i)
		return r, err
	})
	res, err := w.Run(t.Context(), m, nil, 60, Options{})
	testenv.OK(t, err)
	if res.Evictions == 0 || len(r.events) == 0 {
		t.Fatalf("%d evictions and %d events: nothing to check", res.Evictions, len(r.events))
	}
	testenv.NoError(t, policytest.CheckEvents(r.events))
}

var update = flag.Bool("update", false, "write the golden files anew")

func grid(t testing.TB, workloads ...*Workload) *Grid {
	t.Helper()
	g := &Grid{Workloads: workloads, ChunkBytes: 4096, Options: Options{Prefill: DefaultPrefill()}}
	for _, name := range []string{"lru", "sieve", "arc", Belady, Infinite} {
		g.Policies = append(g.Policies, evicts(t, name))
	}
	for _, text := range []string{"2%", "10%", "50%"} {
		c, err := ParseCapacity(text)
		testenv.OK(t, err)
		g.Capacities = append(g.Capacities, c)
	}
	return g
}

func outcome(t testing.TB, g *Grid) *Outcome {
	t.Helper()
	o, err := g.Run(context.Background())
	testenv.OK(t, err)
	return o
}

func TestGrid(t *testing.T) {
	w := generated(t, 400)
	g := grid(t, w, workload(t, []uint64{1, 2, 3, 4}, []uint64{1, 2, 3, 4}, []uint64{9, 8, 7, 6, 5, 4, 3, 2, 1}))
	if _, err := g.Run(context.Background()); !errors.Is(err, ErrCapacity) {
		t.Errorf("2 %% of nine chunks: %v", err)
	}
	g.Workloads = g.Workloads[:1]
	var seen atomic.Int64
	g.Options.Progress = func(n int) { seen.Add(int64(n)) }
	o := outcome(t, g)
	if seen.Load() != g.Accesses() {
		t.Errorf("progress counted %d accesses of %d", seen.Load(), g.Accesses())
	}
	for j, p := range g.Policies {
		for k := range g.Capacities {
			r := o.At(0, j, k)
			if r.Policy != p.Text || r.Trace != w.Name || r.Accesses != w.Accesses() || r.Hits == 0 ||
				r.AccessesPerSecond <= 0 {
				t.Errorf("%s at %s: %+v", p.Label, g.Capacities[k], r)
			}
			if r.PrefixHits > r.Hits || r.SavedRatio > r.PrefixHitRatio*2 {
				t.Errorf("%s at %s: %d hits of which %d in prefixes; %.3f saved", p.Label, g.Capacities[k], r.Hits,
					r.PrefixHits, r.SavedRatio)
			}
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	g.Workloads[0] = generated(t, 3000)
	if _, err := g.Run(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("after cancelling: %v", err)
	}
}

// speeds are the only part of a table that differs between two runs.
var speeds = regexp.MustCompile(`(?s)M accesses/s.*?\n\n`)

func TestGoldenTable(t *testing.T) {
	other := generated(t, 120)
	other.Name = "other"
	var table bytes.Buffer
	testenv.OK(t, outcome(t, grid(t, generated(t, 400), other)).WriteTable(&table))
	golden(t, "testdata/table.txt", speeds.ReplaceAll(table.Bytes(), nil))
}

// Seconds have one form in all tables: at least three digits, and no exponent.
func TestSeconds(t *testing.T) {
	for s, want := range map[float64]string{0: "0 s", 3588.4: "3588 s", 99.96: "100.0 s", 12.345: "12.3 s", 2: "2.00 s", 0.012345: "0.0123 s",
		-3588: "-3588 s", 1.5e-5: "0.0000150 s", 7e6: "7000000 s"} {
		if got := seconds(s); got != want {
			t.Errorf("%g seconds: got %s, want %s", s, got, want)
		}
	}
}

func golden(t *testing.T, file string, got []byte) {
	t.Helper()
	if *update {
		testenv.OK(t, os.WriteFile(file, got, 0o644))
	}
	want, err := os.ReadFile(file)
	testenv.OK(t, err)
	if !bytes.Equal(got, want) {
		t.Errorf("%s: run with -update if this is meant:\n%s", file, got)
	}
}

// CSV has what JSON has, a column for each value.
func TestWriteCSV(t *testing.T) {
	for name, results := range map[string]any{
		"plain":  outcome(t, grid(t, generated(t, 120))).Results,
		"levels": levelOutcome(t, levelGrid(t, generated(t, 120), "lru", "2%", "10%")).Results,
	} {
		var text bytes.Buffer
		testenv.OK(t, WriteCSV(&text, results))
		lines, err := csv.NewReader(&text).ReadAll()
		testenv.OK(t, err)
		marshalled, err := json.Marshal(results)
		testenv.OK(t, err)
		var want []map[string]any
		d := json.NewDecoder(bytes.NewReader(marshalled))
		d.UseNumber()
		testenv.OK(t, d.Decode(&want))
		if len(lines) != len(want)+1 {
			t.Fatalf("%s: %d lines of %d results", name, len(lines), len(want))
		}
		for i, values := range lines[1:] {
			for j, column := range lines[0] {
				var at any = want[i]
				for part := range strings.SplitSeq(column, ".") {
					if list, ok := at.([]any); ok {
						n, err := strconv.Atoi(part)
						testenv.OK(t, err)
						at = list[n]
					} else {
						at = at.(map[string]any)[part]
					}
				}
				a, errA := strconv.ParseFloat(values[j], 64)
				b, errB := strconv.ParseFloat(fmt.Sprint(at), 64)
				if fmt.Sprint(at) != values[j] && (errA != nil || errB != nil || a != b) {
					t.Errorf("%s: %s of line %d is %s, JSON has %v", name, column, i, values[j], at)
				}
			}
		}
	}
}
