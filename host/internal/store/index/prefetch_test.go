package index

import (
	"math/rand/v2"
	"testing"
)

// TestMatchBuckets compares the assembly with the Go code that it stands for.
func TestMatchBuckets(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	for shift := uint(1); shift < 32; shift++ {
		for range 200 {
			var buckets [PrefetchStep]*bucket
			var fps [PrefetchStep]uint64
			var got [PrefetchStep]uint32
			for i := range buckets {
				fps[i] = rng.Uint64()
				if rng.IntN(5) == 0 {
					continue
				}
				buckets[i] = new(bucket)
				for j := range buckets[i] {
					switch c := &buckets[i][j]; rng.IntN(4) {
					case 0:
						*c = uint32(fps[i])<<shift | rng.Uint32()&(1<<shift-1)
					case 1:
						*c = uint32(fps[i])<<shift ^ 1<<(shift+uint(rng.IntN(int(32-shift))))
					case 2:
						*c = emptyCell
					default:
						*c = rng.Uint32()
					}
				}
			}
			matchBuckets(&buckets, &fps, shift, &got)
			for i, b := range buckets {
				want := uint32(0)
				if b != nil {
					want = matchBucket(b, fps[i], shift)
				}
				if got[i] != want {
					t.Fatalf("shift %d: bucket %d of %x for %x: %016b, want %016b", shift, i, b, fps[i], got[i], want)
				}
			}
		}
	}
}
