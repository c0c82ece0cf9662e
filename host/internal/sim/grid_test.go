package sim

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"os"
	"regexp"
	"sync/atomic"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
)

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
