package trace

import "math/bits"

// draw is a stream of pseudo-random numbers (SplitMix64) and the few distributions that the generator needs. All are
// in integers: floating point may differ between CPUs, and a seed must give the same trace everywhere.
type draw struct{ state uint64 }

func (d *draw) next() uint64 {
	d.state += 0x9e3779b97f4a7c15
	z := d.state
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// below is uniform on [0, n).
func (d *draw) below(n int64) int64 {
	hi, _ := bits.Mul64(d.next(), uint64(n))
	return int64(hi)
}

// between is uniform on [lo, hi].
func (d *draw) between(lo, hi int64) int64 { return lo + d.below(hi-lo+1) }

// chance is true in percent of cases.
func (d *draw) chance(percent int64) bool { return d.below(100) < percent }

// around is exponential with the given mean: most are small, few are many times as large.
func (d *draw) around(mean int64) int64 {
	// -log2 of a uniform u in (0,1], in 1/65536: the exponent exactly, the mantissa f by the parabola
	// log2(1+f) = f + 0.3437*f*(1-f), good to 1 %.
	u := d.next() | 1
	n := bits.Len64(u)
	f := int64((u << (64 - n) << 1) >> 48) // 16 bits below the leading one
	log := int64(n-1)<<16 + f + 22524*(f*(65536-f)>>16)>>16
	minus := int64(64)<<16 - log
	const ln2 = 45426 // ln 2 in 1/65536
	return mean * (minus * ln2 >> 16) >> 16
}

// low is uniform-squared on [0, n): small numbers are more popular.
func (d *draw) low(n int64) int64 { return min(d.below(n), d.below(n)) }
