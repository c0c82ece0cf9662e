package prefix

import "math/bits"

// A fit converts the counts to hazards, weights and indexes. It is done in steps, so that no call takes long.
const (
	weightSteps = partLeft * features
	firstRow    = parts + weightSteps
	fitSteps    = firstRow + rows
)

// fit does one step. It returns the row that the step computed, or -1.
func (m *model) fit(step int) int {
	switch {
	case step < parts:
		m.fitHazard(step)
	case step < firstRow:
		m.fitWeights((step-parts)/features, (step-parts)%features)
	default:
		m.fitRow(step - firstRow)
		return step - firstRow
	}
	return -1
}

// place returns the baseline and the weight level of a row.
func place(row int) (base, level int) {
	if row < baseLeft*levels {
		return row / levels, row % levels
	}
	return row - baseLeft*(levels-1), 0
}

// fitHazard estimates the hazard of a part and of each of its pause groups. An age with few observations is pulled
// towards the age before it, and a pause group towards its part.
func (m *model) fitHazard(p int) {
	first, last := int(partBase(uint8(p), 0)), int(partBase(uint8(p), pauses-1))
	given := uint64(priorHazard)
	if p == partOrphan {
		given = orphanHazard
	}
	prior := given
	for b := range buckets {
		whole := m.hazardAt(first, last, b, prior)
		prior = (4*whole + given) / 5
	}
}

// hazardAt is fitHazard for one age. It returns the hazard of the part.
func (m *model) hazardAt(first, last, b int, prior uint64) uint64 {
	var n, d uint64
	for base := first; base <= last; base++ {
		n += m.stays[base][b]
		d += m.reuses[base][b]
	}
	whole := min((d*one+priorStays*prior)/(n+priorStays), 8*one)
	for base := first; base <= last; base++ {
		h := (m.reuses[base][b]*one + pauseStays*whole) / (m.stays[base][b] + pauseStays)
		m.hazard[base][b] = uint32(min(h, 8*one))
	}
	return whole
}

// weightMost is the limit of a weight and of its inverse, as a power of two.
const weightMost = 4

// fitWeights estimates the weights of one feature. The weight of a value is the number of observed reuses divided by
// the number expected without this feature, pulled towards the weights of neighbouring values. Values are ordered
// within groups of eight.
func (m *model) fitWeights(p, f int) {
	seen, exp := &m.seen[p][f], &m.expected[p][f]
	so, se := uint64(one), uint64(one)
	for v := range seen {
		so += seen[v]
		se += exp[v]
	}
	var e [fvalues]uint64
	for v := range exp {
		e[v] = exp[v] * so / se
	}
	for v := range seen {
		o1, e1 := uint64(sideEvents), uint64(sideEvents)
		if v&7 > 0 {
			o1 += seen[v-1]
			e1 += e[v-1]
		}
		if v&7 < 7 && v+1 < fvalues {
			o1 += seen[v+1]
			e1 += e[v+1]
		}
		o := seen[v] + valueEvents*o1/e1
		d := e[v] + valueEvents
		o = max(o, d>>weightMost)
		d = max(d, o>>weightMost)
		m.weight[p][f][v] = m.log.of(o) - m.log.of(d)
		m.inverse[p][f][v] = uint32(d * weightOne / o)
	}
}

const survivalOne = 1 << 30

// fitRow computes the effective weights and the Gittins index of a row at every age. A row is one baseline at one weight level.
//
// Each end of a bucket is a point (T, F): T is the expected time until then, and F is the probability of a reuse by then. The index at an
// age is the steepest slope from its point to a later one. It is an edge of the upper convex hull of the later points, which is built from
// the right.
func (m *model) fitRow(row int) {
	var f, t points
	base, l := place(row)
	w, hazard := m.levelW[l], &m.hazard[base]
	if base >= baseLeft {
		w = weightOne
	}
	eff, index := &m.effective[row], m.index[row*buckets:][:buckets]
	m.survive(w, hazard, &f, &t, eff)
	var hull [buckets + 1]uint8
	hull[0] = buckets
	top := 0
	for b := buckets - 1; b >= 0; b-- {
		var best uint64
		top, best = steepest(&f, &t, &hull, top, b)
		index[b] = uint32(m.log.of(best))
		top++
		hull[top] = uint8(b)
	}
}

// points are the coordinates of the ends of the buckets.
type points [buckets + 1]uint64

// survive computes survival under weight w: the points, and the remaining weight at each age.
func (m *model) survive(w uint64, hazard *[buckets]uint32, f, t *points, eff *[buckets]uint16) {
	const unit = one * weightOne
	var cum uint64
	s := uint64(survivalOne)
	for b := range buckets {
		eff[b] = uint16(max(1, w*s/survivalOne))
		cum += w * uint64(hazard[b])
		next := survivalOne * unit / (unit + cum)
		f[b+1] = f[b] + (s - next)
		t[b+1] = t[b] + (s+next)/2*(m.edge[b+1]-m.edge[b])
		s = next
	}
}

// steepest removes the points from the hull that are not on it as seen from point b. It returns the slope of the hull's
// first edge.
func steepest(f, t *points, hull *[buckets + 1]uint8, top, b int) (int, uint64) {
	fb, tb := f[b], t[b]
	x := hull[top]
	best := slope(f[x]-fb, t[x]-tb)
	for top > 0 {
		y := hull[top-1]
		next := slope(f[y]-fb, t[y]-tb)
		if best > next {
			break
		}
		best = next
		top--
	}
	return top, best
}

// slopeOne scales a slope. f is at most survivalOne, so the quotient does not overflow.
const (
	slopeOne  = 1 << 33
	slopeTime = 1 << 24
)

func slope(f, t uint64) uint64 { return f * slopeOne / (t/slopeTime + 1) }

const (
	lgBits = 12
	lgOne  = 1 << lgBits
)

// logTable holds log2 of 1 + i/256 in units of 1/lgOne.
type logTable [257]int32

// init computes logarithms by repeated squaring: each squaring that exceeds two yields a bit.
func (t *logTable) init() {
	for i := range t[:256] {
		x, v := uint64(256+i)<<22, int32(0) // in 1<<30
		for k := 0; k < lgBits; k++ {
			x = x * x >> 30
			v <<= 1
			if x >= 2<<30 {
				x >>= 1
				v++
			}
		}
		t[i] = v
	}
	t[256] = lgOne
}

// of returns log2(x) in units of 1/lgOne. of(0) is 0.
func (t *logTable) of(x uint64) int32 {
	if x == 0 {
		return 0
	}
	n := bits.Len64(x) - 1
	frac := x << (63 - n) << 1 >> 40 // 24 bits after the leading one
	i := frac >> 16
	a, b := t[i], t[i+1]
	return int32(n)<<lgBits + a + int32(uint64(b-a)*(frac&0xffff)>>16)
}
