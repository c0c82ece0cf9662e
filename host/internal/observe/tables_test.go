package observe

import "testing"

func TestBucketBounds(t *testing.T) {
	bounds := []float64{1, 2, 4}
	for _, c := range []struct {
		q       float64
		buckets []uint64
		want    float64
	}{
		{0.5, []uint64{0, 0, 0, 0}, 0},
		{0.5, []uint64{1, 1, 0, 0}, 1},
		{0.99, []uint64{98, 1, 1, 0}, 2},
		{1, []uint64{98, 1, 1, 0}, 4},
		{0.99, []uint64{0, 0, 0, 5}, 4},
	} {
		if got := bucketBound(c.q, bounds, c.buckets); got != c.want {
			t.Errorf("quantile %v of %v: %v, want %v", c.q, c.buckets, got, c.want)
		}
	}
}
