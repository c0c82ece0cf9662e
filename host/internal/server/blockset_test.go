package server

import (
	"math/rand/v2"
	"testing"
)

// A set finds what a map finds, also when many jobs use it one after the other.
func TestBlockSet(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	var set blockSet
	for range 200 {
		n := rng.IntN(3000)
		set.Begin(n)
		seen := map[uint32]bool{}
		for range n {
			b := rng.Uint32N(uint32(n)) << rng.IntN(20)
			if got := set.Add(b); got == seen[b] {
				t.Fatalf("add(%d): %t, it was named before: %t", b, got, seen[b])
			}
			seen[b] = true
		}
	}
	set.Begin(1)
	set.Add(7)
	set.stamp = 1<<32 - 1
	if set.Begin(1); !set.Add(7) {
		t.Error("7 is left of a job before the stamps started again")
	}
}
