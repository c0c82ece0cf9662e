package sim

import (
	"math"
	"strconv"
)

// scale maps values to pixels, linearly or by their logarithm.
type scale struct {
	lo, hi   float64 // values
	from, to float64 // pixels
	log      bool
}

// newScale spans the values. It is logarithmic when the largest is more than ratio times the smallest.
func newScale(values []float64, from, to, ratio float64) scale {
	lo, hi := math.Inf(1), math.Inf(-1)
	for _, v := range values {
		lo, hi = min(lo, v), max(hi, v)
	}
	s := scale{lo: lo, hi: hi, from: from, to: to, log: lo > 0 && hi/lo > ratio}
	pad := 0.04
	switch {
	case lo == hi:
		s.lo, s.hi = lo-0.5, hi+0.5
	case s.log:
		f := math.Pow(hi/lo, pad)
		s.lo, s.hi = lo/f, hi*f
	default:
		s.lo, s.hi = lo-pad*(hi-lo), hi+pad*(hi-lo)
	}
	return s
}

func (s scale) at(v float64) float64 {
	part := (v - s.lo) / (s.hi - s.lo)
	if s.log {
		part = math.Log(v/s.lo) / math.Log(s.hi/s.lo)
	}
	return s.from + part*(s.to-s.from)
}

// ticks are round values within the scale.
func (s scale) ticks() (ticks []float64) {
	if s.log {
		for e := math.Floor(math.Log10(s.lo)); e <= math.Log10(s.hi); e++ {
			for _, m := range []float64{1, 2, 5} {
				if v := m * math.Pow(10, e); v >= s.lo && v <= s.hi {
					ticks = append(ticks, v)
				}
			}
		}
		return ticks
	}
	step := math.Pow(10, math.Floor(math.Log10((s.hi-s.lo)/4)))
	for _, m := range []float64{1, 2, 5, 10} {
		if (s.hi-s.lo)/(step*m) <= 7 {
			step *= m
			break
		}
	}
	for n := math.Ceil(s.lo / step); n*step <= s.hi; n++ {
		ticks = append(ticks, n*step)
	}
	return ticks
}

func number(v float64) string { return strconv.FormatFloat(v, 'g', 3, 64) }
