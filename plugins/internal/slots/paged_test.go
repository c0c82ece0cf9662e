package slots

import (
	"math/rand/v2"
	"testing"
)

func TestArrayGrowsWithWhatIsMade(t *testing.T) {
	const n = 10*PageLen + 7
	a := NewArray[uint64](n, 42)
	if a.Len() != n || a.Made() != 0 || *a.At(0) != 42 || *a.At(n - 1) != 42 {
		t.Fatalf("a new array: %d elements, %d made, %d and %d", a.Len(), a.Made(), *a.At(0), *a.At(n - 1))
	}
	want := map[uint32]uint64{}
	for range 100 {
		i := rand.Uint32N(3*PageLen) + 4*PageLen
		want[i] = rand.Uint64()
		*a.Make(i) = want[i]
	}
	*a.Make(n - 1) = 1
	want[n-1] = 1
	if a.Made() != n {
		t.Errorf("%d elements are made, want all %d", a.Made(), n)
	}
	for i := range uint32(n) {
		v, ok := want[i]
		if !ok {
			v = 42
		}
		if *a.At(i) != v {
			t.Fatalf("element %d is %d, want %d", i, *a.At(i), v)
		}
	}
	if made := testing.AllocsPerRun(1, func() { a.Make(5 * PageLen) }); made != 0 {
		t.Errorf("a page that is there was made again: %v allocations", made)
	}
	if made := testing.AllocsPerRun(1, func() { b := NewArray[[64]byte](PageLen*1000, [64]byte{}); b.Make(0) }); made > 3 {
		t.Errorf("%v allocations for one page of a thousand", made)
	}
}

// A table of chains through an array finds what is in it, at every size.
func TestBucketsSplit(t *testing.T) {
	const n, none = 3000, 1<<32 - 1
	b := NewBuckets(n, none)
	next, hash := make([]uint32, n), make([]uint32, n)
	for i := range uint32(n) {
		hash[i] = rand.Uint32()
		head := b.Of(hash[i])
		next[i], *head = *head, i
		if old, made, bit, ok := b.Add(); ok {
			rest := *old
			*old = none
			for rest != none {
				to, j := old, rest
				if rest = next[j]; hash[j]&bit != 0 {
					to = made
				}
				next[j], *to = *to, j
			}
		} else if i != n-1 {
			t.Fatalf("no bucket after %d", i)
		}
		longest := 0
		for j := range i + 1 {
			at, steps := *b.Of(hash[j]), 0
			for ; at != j; at = next[at] {
				if steps++; at == none {
					t.Fatalf("entry %d is lost when there are %d", j, i)
				}
			}
			longest = max(longest, steps)
		}
		if longest > 24 {
			t.Fatalf("a chain of %d with %d entries in as many buckets", longest, i)
		}
	}
}
