//go:build !race

package codec

import (
	"math/rand/v2"
	"testing"
)

// Under the race detector a pool forgets what it is given, at random.
func TestAllocatesNothing(t *testing.T) {
	r := rand.New(rand.NewPCG(11, 12))
	extent, stored := make([]byte, MaxBytes), make([]byte, MaxBytes)
	bfloat16(r, extent, 1)
	n, by := Encode(stored, extent, 2)
	if allocated := testing.AllocsPerRun(100, func() { Encode(stored, extent, 2) }); allocated >= 1 {
		t.Errorf("Encode allocates %.1f times for an extent", allocated)
	}
	got := make([]byte, MaxBytes)
	if allocated := testing.AllocsPerRun(100, func() { _ = Decode(got, stored[:n], by) }); allocated >= 1 {
		t.Errorf("Decode allocates %.1f times for an extent", allocated)
	}
}
