package replay

import (
	"math"
	"math/bits"
	"testing"

	"github.com/kvhost/kvhost/host/chunk"
)

// A wrong byte anywhere is counted, once.
func TestMismatchesCountsBytes(t *testing.T) {
	for _, c := range []content{uniformPages{}, normalPages{normalValues()}} {
		for _, size := range []int{1, 7, 8, 31, 32, 33, 100, 4096, 4099} {
			page := make([]byte, size)
			c.fill(page, 12345)
			if got := c.mismatches(page, 12345); got != 0 {
				t.Fatalf("%T, size %d: %d mismatches in what was filled", c, size, got)
			}
			for i := range page {
				page[i] ^= 1 << (i % 8)
				if got := c.mismatches(page, 12345); got != 1 {
					t.Fatalf("%T, size %d: byte %d is wrong, %d mismatches", c, size, i, got)
				}
				page[i] ^= 1 << (i % 8)
			}
			poisonPage(page)
			if got := c.mismatches(page, 12345); got < int64(size)*9/10 {
				t.Errorf("%T, size %d: poison has only %d mismatches", c, size, got)
			}
		}
	}
}

// The values are those of a normal distribution: their mean, variance and share within one deviation.
func TestNormalPages(t *testing.T) {
	page := make([]byte, 1<<20)
	normalPages{normalValues()}.fill(page, 7)
	var sum, squares, within float64
	n := float64(len(page) / 2)
	for i := 0; i < len(page); i += 2 {
		v := float64(math.Float32frombits(uint32(page[i])<<16 | uint32(page[i+1])<<24))
		sum, squares = sum+v, squares+v*v
		if math.Abs(v) < 1 {
			within++
		}
	}
	if mean, variance := sum/n, squares/n; math.Abs(mean) > 0.01 || math.Abs(variance-1) > 0.01 || math.Abs(within/n-0.6827) > 0.01 {
		t.Errorf("mean %.4f, variance %.4f, %.4f within one deviation", mean, variance, within/n)
	}
}

func TestDiffering(t *testing.T) {
	for x, want := range map[uint64]int64{0: 0, 1: 1, 0x80: 1, 1 << 63: 1, ^uint64(0): 8, 0x0100000000000080: 2,
		0x00ff00ff00ff00ff: 4} {
		if got := differing(x); got != want {
			t.Errorf("differing(%#x) = %d, want %d", x, got, want)
		}
	}
}

// Pages that differ in any coordinate have no bytes in common, shifted or not.
func TestPagesDiffer(t *testing.T) {
	keys := ChainKeys(nil, []uint64{0, 1, 2})
	seen := map[uint64]bool{}
	for i := range keys {
		for rank := range uint32(3) {
			for layer := range uint32(3) {
				for part := range uint32(2) {
					for block := range uint32(3) {
						seed := pageSeed(&keys[i], rank, chunk.Plane{Layer: layer, Part: part}, block)
						for w := range uint64(32) {
							v := word(seed + w*step)
							if seen[v] {
								t.Fatalf("a word twice: key %d rank %d layer %d part %d block %d word %d", i, rank,
									layer, part, block, w)
							}
							seen[v] = true
						}
					}
				}
			}
		}
	}
	ones := 0
	for v := range seen {
		ones += bits.OnesCount64(v)
	}
	if share := float64(ones) / float64(64*len(seen)); share < 0.49 || share > 0.51 {
		t.Errorf("%.3f of the bits are set", share)
	}
}

func TestKeysAreChained(t *testing.T) {
	a, b := ChainKeys(nil, []uint64{1, 2, 3, 4}), ChainKeys(nil, []uint64{1, 2, 9, 4})
	if a[0] != b[0] || a[1] != b[1] {
		t.Error("a shared prefix has other keys")
	}
	if a[2] == b[2] || a[3] == b[3] {
		t.Error("different prefixes share a key")
	}
	if a[0] == chunk.Root {
		t.Error("a key is the root")
	}
}

func BenchmarkFill(b *testing.B) {
	page := make([]byte, 16<<10)
	b.SetBytes(int64(len(page)))
	for b.Loop() {
		fill(page, 1)
	}
}

func BenchmarkMismatches(b *testing.B) {
	page := make([]byte, 16<<10)
	fill(page, 1)
	b.SetBytes(int64(len(page)))
	for b.Loop() {
		if mismatches(page, 1) != 0 {
			b.Fatal("mismatch")
		}
	}
}
