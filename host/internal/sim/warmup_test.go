package sim

import (
	"errors"
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
