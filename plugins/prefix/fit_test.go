package prefix

import (
	"math"
	"math/rand/v2"
	"testing"
)

func TestBucketOf(t *testing.T) {
	var m model
	m.init()
	for b := 1; b < buckets; b++ {
		e := m.edge[b]
		if e >= 1<<31 {
			break
		}
		if m.edge[b+1] <= e {
			t.Fatalf("bucket %d is empty", b)
		}
		if got := int(bucketOf(uint32(e))); got != b {
			t.Errorf("age %d is in bucket %d, want %d", e, got, b)
		}
		if got := int(bucketOf(uint32(e - 1))); got >= b {
			t.Errorf("age %d is in bucket %d, want below %d", e-1, got, b)
		}
	}
	if bucketOf(0) != 0 || bucketOf(math.MaxUint32) != buckets-1 {
		t.Error("the first and the last bucket do not hold the extremes")
	}
}

func TestLog(t *testing.T) {
	var l logTable
	l.init()
	r := rand.New(rand.NewPCG(1, 2))
	for range 10000 {
		x := r.Uint64() >> r.IntN(63)
		if x == 0 {
			continue
		}
		got, want := float64(l.of(x))/lgOne, math.Log2(float64(x))
		if math.Abs(got-want) > 0.001 {
			t.Fatalf("log2(%d) is %f, want %f", x, got, want)
		}
	}
}

// The index against its definition: the best ratio over all horizons, by brute force in floating point.
func TestIndexIsTheBestRatio(t *testing.T) {
	var m model
	m.init()
	r := rand.New(rand.NewPCG(3, 4))
	for range 50 {
		for b := range m.hazard[0] {
			m.hazard[0][b] = uint32(r.ExpFloat64() * one / 10)
		}
		l := r.IntN(levels)
		m.fitRow(l)
		w := float64(m.levelW[l]) / weightOne
		var s, f, held [buckets + 1]float64
		s[0] = 1
		cum := 0.0
		for b := range buckets {
			cum += w * float64(m.hazard[0][b]) / one
			s[b+1] = 1 / (1 + cum)
			f[b+1] = f[b] + s[b] - s[b+1]
			held[b+1] = held[b] + (s[b]+s[b+1])/2*float64(m.edge[b+1]-m.edge[b])
		}
		first := m.log.of(slope(survivalOne, survivalOne<<12))
		for b := range buckets {
			best := 0.0
			for x := b + 1; x <= buckets; x++ {
				if held[x] > held[b] {
					best = max(best, (f[x]-f[b])/(held[x]-held[b]))
				}
			}
			got := float64(int32(m.index[l*buckets+b])-first)/lgOne - 12
			if want := math.Log2(best); math.Abs(got-want) > 0.02 {
				t.Fatalf("level %d bucket %d: index %f, want %f", l, b, got, want)
			}
		}
	}
}
