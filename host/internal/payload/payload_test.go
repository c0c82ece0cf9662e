package payload

import (
	"errors"
	"math"
	"math/bits"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/kv"
)

var dtypes = []string{U8, BFloat16, FP8}

func of(t testing.TB, dtype string) Content {
	t.Helper()
	c, err := Of(dtype)
	testenv.OK(t, err)
	return c
}

func TestUnknownContent(t *testing.T) {
	if _, err := Of("fp4"); !errors.Is(err, ErrDType) {
		t.Error(err)
	}
}

// A wrong byte anywhere is counted, once.
func TestMismatchesCountsBytes(t *testing.T) {
	for _, dtype := range dtypes {
		c := of(t, dtype)
		for _, size := range []int{1, 7, 8, 31, 32, 33, 100, 4096, 4099} {
			page := make([]byte, size)
			c.Fill(page, 12345)
			if got := c.Mismatches(page, 12345); got != 0 {
				t.Fatalf("%s, size %d: %d mismatches in what was filled", dtype, size, got)
			}
			for i := range page {
				page[i] ^= 1 << (i % 8)
				if got := c.Mismatches(page, 12345); got != 1 {
					t.Fatalf("%s, size %d: byte %d is wrong, %d mismatches", dtype, size, i, got)
				}
				page[i] ^= 1 << (i % 8)
			}
		}
	}
}

// value is what 8 bits are.
func value(e4m3 byte) float64 {
	exponent, mantissa := int(e4m3>>3&15), float64(e4m3&7)
	v := math.Ldexp(mantissa/8, -6)
	if exponent > 0 {
		v = math.Ldexp(1+mantissa/8, exponent-7)
	}
	if e4m3 >= 0x80 {
		return -v
	}
	return v
}

// The values are those of a normal distribution: their mean, variance and share within one deviation.
func TestNormalPages(t *testing.T) {
	for dtype, list := range map[string]func(page []byte) []float64{
		BFloat16: func(page []byte) (list []float64) {
			for i := 0; i < len(page); i += 2 {
				list = append(list, float64(math.Float32frombits(uint32(page[i])<<16|uint32(page[i+1])<<24)))
			}
			return list
		},
		FP8: func(page []byte) (list []float64) {
			for _, b := range page {
				list = append(list, value(b))
			}
			return list
		},
	} {
		page := make([]byte, 1<<20)
		of(t, dtype).Fill(page, 7)
		var sum, squares, within float64
		for _, v := range list(page) {
			sum, squares = sum+v, squares+v*v
			if math.Abs(v) < 0.97 { // between two values of 8 bits
				within++
			}
		}
		n := float64(len(list(page)))
		if mean, variance := sum/n, squares/n; math.Abs(mean) > 0.01 || math.Abs(variance-1) > 0.01 || math.Abs(within/n-0.668) > 0.01 {
			t.Errorf("%s: mean %.4f, variance %.4f, %.4f within one deviation", dtype, mean, variance, within/n)
		}
	}
}

// Every finite value of 8 bits is its own, and what is between two goes to the nearer one.
func TestRoundingToE4M3(t *testing.T) {
	for bits := range 0x7f {
		b := byte(bits)
		if got := e4m3(value(b)); got != b {
			t.Errorf("%g is %#x, want %#x", value(b), got, b)
		}
		if got := e4m3(-value(b)); bits > 0 && got != b|0x80 {
			t.Errorf("%g is %#x, want %#x", -value(b), got, b|0x80)
		}
		if bits == 0x7e {
			break
		}
		next := value(b + 1)
		for _, c := range []struct {
			v    float64
			want byte
		}{{value(b)*0.6 + next*0.4, b}, {value(b)*0.4 + next*0.6, b + 1}, {(value(b) + next) / 2, b + b&1}} {
			if got := e4m3(c.v); got != c.want {
				t.Errorf("%g is %#x, want %#x", c.v, got, c.want)
			}
		}
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
	keys := []kv.Key{{1}, {2}, {31: 1}, {9: 1}}
	seen := map[uint64]bool{}
	for i := range keys {
		for rank := range uint32(3) {
			for layer := range uint32(3) {
				for part := range uint32(2) {
					for block := range uint32(3) {
						seed := Seed(&keys[i], rank, kv.Plane{Layer: layer, Part: part}, block)
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
