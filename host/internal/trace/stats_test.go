package trace

import (
	"math/rand/v2"
	"slices"
	"testing"
)

func TestStats(t *testing.T) {
	c := NewCollector()
	if s := c.Stats(); s.HitRatio() != 0 || s.OneTimeShare() != 0 || s.Blocks.Quantile(0.5) != 0 {
		t.Errorf("of nothing: %+v", s)
	}
	for _, r := range []Request{
		{Timestamp: 1000, InputLength: 10, OutputLength: 1, HashIDs: []uint64{1, 2, 3}},
		{Timestamp: 3000, InputLength: 20, OutputLength: 2, HashIDs: []uint64{1, 2, 4, 5}},
		{Timestamp: 2000, InputLength: 30, OutputLength: 3, HashIDs: []uint64{6, 2}},
		// 2 after 6: not chained, not a prefix hit
	} {
		c.Add(&r)
	}
	s := c.Stats()
	if s.Requests != 3 || s.Accesses != 9 || s.Unique != 6 || s.OneTime != 4 || s.PrefixHits != 2 ||
		s.OtherParents != 1 ||
		s.SpanMillis != 2000 || s.InputTokens != 60 || s.OutputTokens != 6 {
		t.Errorf("the statistics are %+v", s)
	}
	if got := s.HitRatio(); got != 3.0/9 {
		t.Errorf("hit ratio %v", got)
	}
	if s.Blocks.Max() != 4 || s.Blocks.Quantile(0.5) != 3 || s.Blocks.Mean() != 3 {
		t.Errorf("blocks: max %d, median %d, mean %v", s.Blocks.Max(), s.Blocks.Quantile(0.5), s.Blocks.Mean())
	}
	if s.ReuseMillis.Count() != 3 || s.ReuseMillis.Max() != 2000 || s.ReuseMillis.Quantile(0) != 0 {
		t.Errorf("reuse: %d, max %d", s.ReuseMillis.Count(), s.ReuseMillis.Max())
	}
}

// Quantiles agree with a sorted list to the precision promised.
func TestHistogram(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, bits := range []int{1, 5, 10, 16} {
		h, half := NewHistogram(bits), NewHistogram(bits)
		var all []uint64
		for i := range 20_000 {
			v := rng.Uint64() >> rng.IntN(64)
			all = append(all, v)
			if i%2 == 0 {
				h.Record(v)
			} else {
				half.Record(v)
			}
		}
		h.Merge(half)
		slices.Sort(all)
		if h.Count() != uint64(len(all)) || h.Max() != all[len(all)-1] {
			t.Fatalf("bits %d: %d values, max %d", bits, h.Count(), h.Max())
		}
		for _, q := range []float64{0, 0.01, 0.5, 0.9, 0.99, 1} {
			want := all[max(0, int(q*float64(len(all)))-1)]
			got := h.Quantile(q)
			if off := max(got, want) - min(got, want); float64(off) > float64(want)/float64(uint64(1)<<bits)+1 {
				t.Errorf("bits %d: quantile %v is %d, want %d", bits, q, got, want)
			}
		}
	}
}
