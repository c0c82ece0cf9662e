package sim

import (
	"bytes"
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
)

func warmup(t testing.TB, text string) Warmup {
	t.Helper()
	u, err := ParseWarmup(text)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

// The requests of TestCounts; the first two of them fill the cache.
func TestWarmup(t *testing.T) {
	w := workload(t, []uint64{1, 2, 3}, []uint64{1, 2}, []uint64{1, 4}, []uint64{2, 3}, []uint64{1, 2, 3})
	for _, text := range []string{"2", "40%", "59.9%"} {
		o := Options{Prefill: Prefill{TokensPerSecond: 1, ChunkTokens: 1}, Warmup: warmup(t, text)}
		r := run(t, w, native(t, "lru"), 3, o)
		if r.Hits != 4 || r.Evictions != 3 || r.Accesses != 7 || r.PrefixHits != 2 || r.SavedSeconds != 2 ||
			r.RecomputeSeconds != 7 || r.Warmup != 2 || r.Policy != "lru" || r.Capacity != 3 {
			t.Errorf("%s: %+v", text, r)
		}
		if r, err := w.RunInfinite(t.Context(), o); err != nil || r.Hits != 6 || r.PrefixHits != 6 || r.Accesses != 7 {
			t.Errorf("%s: without limit: %+v, %v", text, r, err)
		}
		if r, err := w.RunBelady(t.Context(), 3, o); err != nil || r.Accesses != 7 || r.Hits > 6 || r.Capacity != 3 {
			t.Errorf("%s: the optimum: %+v, %v", text, r, err)
		}
		g := levelGrid(t, w, "native:lru", "3")
		g.Options = o
		got := levelOutcome(t, g).Results[0]
		if f := got.Levels[0]; f.Hits != 4 || f.Loads != 2 || f.New != 3 || f.Drops != 3 || f.Capacity != 3 ||
			got.Accesses != 7 || got.PrefillSeconds != 2 || got.Warmup != 2 {
			t.Errorf("%s: in a level: %+v", text, got)
		}
	}
	for _, text := range []string{"-1", "x", "3GiB", "0%", "5.5"} {
		if _, err := ParseWarmup(text); !errors.Is(err, ErrWarmup) {
			t.Errorf("%q: %v", text, err)
		}
	}
	for _, text := range []string{"5", "100%", "99999999999999999999999%"} {
		if _, err := w.Run(t.Context(), native(t, "lru"), nil, 3, Options{Warmup: warmup(t, text)}); !errors.Is(err, ErrWarmup) {
			t.Errorf("%s: %v", text, err)
		}
	}
}

// Lines of CSV say what JSON says.
func TestCSVIsAsJSON(t *testing.T) {
	w := generated(t, 100)
	one := outcome(t, grid(t, w))
	levels := levelOutcome(t, levelGrid(t, w, "native:lru", "2%", "20%"))
	var oneText, levelText bytes.Buffer
	if err := errors.Join(one.WriteCSV(&oneText), levels.WriteCSV(&levelText)); err != nil {
		t.Fatal(err)
	}
	compare := func(text string, row int, prefix string, result any) {
		t.Helper()
		lines, err := csv.NewReader(strings.NewReader(text)).ReadAll()
		if err != nil {
			t.Fatal(err)
		}
		marshalled, err := json.Marshal(result)
		if err != nil {
			t.Fatal(err)
		}
		d := json.NewDecoder(bytes.NewReader(marshalled))
		d.UseNumber()
		var want map[string]any
		if err := d.Decode(&want); err != nil {
			t.Fatal(err)
		}
		got := map[string]string{}
		for i, name := range lines[0] {
			if _, twice := got[name]; twice {
				t.Errorf("column %s twice", name)
			}
			got[name] = lines[row+1][i]
		}
		for name, value := range want {
			if _, list := value.([]any); list {
				continue
			}
			if name != "level" {
				name = prefix + name
			}
			if text := fmt.Sprint(value); got[name] != text && !sameNumber(got[name], text) {
				t.Errorf("row %d: %s is %q, want %q", row, name, got[name], text)
			}
		}
	}
	for i := range one.Results {
		compare(oneText.String(), i, "", one.Results[i])
	}
	for n, f := range levels.Results[0].Levels {
		compare(levelText.String(), n, "", levels.Results[0])
		compare(levelText.String(), n, "level_", f)
	}
}

func sameNumber(a, b string) bool {
	var x, y float64
	_, err := fmt.Sscan(a, &x)
	_, other := fmt.Sscan(b, &y)
	return err == nil && other == nil && x == y
}
