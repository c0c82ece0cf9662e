package prefix

import "math/bits"

// Parts of a segment in its request. The first four have features. Each part has hazards of its own.
const (
	partNew    = iota // chunks inserted by this request
	partFound         // chunks touched by it, or inserted again after they had been evicted
	partLast          // its last chunk, often a partial block
	partShared        // chunks above a point with many branches
	partLeft          // chunks left over when another request took the chunks above and then other ones
	partOrphan        // chunks stored without their parent, which no lookup by prefix can use until the parent returns
	parts
)

// Baselines. New and found have one for each pause group, and the other parts have one each. Those without features
// come last and have a single row.
const (
	pauses    = 6
	baseLast  = 2 * pauses
	baseLeft  = baseLast + 2
	bases     = baseLeft + 2
	levels    = 24 // weight levels, half an octave apart
	levelOne  = 10 // the level of weight 1
	rows      = baseLeft*levels + bases - baseLeft
	buckets   = 48 // buckets of age, half an octave apart, up to 6.5 days; the first one ends at 2^skipped ticks and half an octave
	skipped   = 5
	cells     = rows * buckets
	features  = 2
	fvalues   = 32
	one       = 1 << 16 // fixed-point 1 of hazards, events and expectations
	weightOne = 1 << 8
)

// Values that the model has before it has seen anything, in reuses and in hazard per bucket of age.
const (
	priorHazard  = one * 3 / 100
	orphanHazard = one / 1024     // the same for orphans
	priorStays   = 30 * weightOne // strength of the pull of a part's hazard towards that of the next younger age
	pauseStays   = 20 * weightOne // strength of the pull of a pause group's hazard towards that of its part
	valueEvents  = 16 * one       // strength of the pull of a feature value's weight towards its neighbours
	sideEvents   = 4 * one        // strength of the pull of the neighbours' weight towards 1
	memory       = 3000           // reuses of a part after which all its counts are halved
	lifetimes    = 8 * memory     // the same for ended segments, where reuses are rare
)

// model holds the learned counts, and the results of fits.
type model struct {
	stays  [bases][buckets]uint64 // ended stays in a bucket of age, weighted, in weightOne
	reuses [bases][buckets]uint64 // the part of the stays that ended by a reuse
	hazard [bases][buckets]uint32 // hazard of reuse in a bucket at weight 1

	seen     [partLeft][features][fvalues]uint64 // reuses by feature value
	expected [partLeft][features][fvalues]uint64 // reuses that the hazards without this feature's weight predict
	weight   [partLeft][features][fvalues]int32  // log2, fixed point lgOne
	inverse  [partLeft][features][fvalues]uint32 // 1/weight, in weightOne

	events    [parts]uint32          // reuses since the last halving
	ended     [parts]uint32          // segments that ended since the last halving, by a reuse or not
	effective [rows][buckets]uint16  // weight at an age after frailty, in weightOne
	index     [rows * buckets]uint32 // logarithm of the Gittins index; a larger one is more valuable
	levelW    [levels]uint64         // weight of a level, in weightOne
	edge      [buckets + 1]uint64    // first age of a bucket, in ticks
	log       logTable
}

func basePart(base uint8) int {
	switch {
	case base < pauses:
		return partNew
	case base < baseLast:
		return partFound
	}
	return int(base) - baseLast + partLast
}

func partBase(part, pause uint8) uint8 {
	switch part {
	case partNew:
		return pause
	case partFound:
		return pauses + pause
	}
	return baseLast + part - partLast
}

// rowOf returns the row of a baseline at a weight level.
func rowOf(base, level int) int {
	if base < baseLeft {
		return base*levels + level
	}
	return baseLeft*levels + base - baseLeft
}

func (m *model) init() {
	m.log.init()
	for l := range m.levelW { // 2^((l-levelOne)/2)
		w := uint64(weightOne) << (l / 2)
		if l&1 == 1 {
			w = w * rootTwo >> 31
		}
		m.levelW[l] = w >> (levelOne / 2)
	}
	for b := 1; b <= buckets; b++ {
		e := uint64(1) << (skipped + b/2)
		if b&1 == 1 {
			e = (e*rootTwo + 1<<31 - 1) >> 31
		}
		m.edge[b] = e
	}
	for p := range m.weight {
		for f := range m.weight[p] {
			for v := range m.weight[p][f] {
				m.inverse[p][f][v] = weightOne
			}
		}
	}
	for step := range firstRow {
		m.fit(step)
	}
	for row := range rows {
		if base, l := place(row); base == 0 || base >= baseLeft {
			m.fitRow(row)
		} else { // nothing is known yet, so it is a copy of the first baseline
			m.effective[row] = m.effective[l]
			copy(m.index[row*buckets:][:buckets], m.index[l*buckets:])
		}
	}
}

const rootTwo = 0xB504F334 // in 1<<31

// bucketOf returns the bucket of an age in ticks.
func bucketOf(age uint32) uint8 {
	if age < 2<<skipped {
		return uint8(min(1, uint64(age)<<31/(rootTwo<<skipped)))
	}
	n := bits.Len32(age) - 1
	b := 2 * (n - skipped)
	if uint64(age)<<(31-n) >= rootTwo {
		b++
	}
	return uint8(min(b, buckets-1))
}

// aged records that a segment has outlived the buckets [from, to).
func (m *model) aged(s *segment, from, to uint8) {
	m.expect(s, outlive(&m.effective[s.row()], &m.stays[s.base], &m.hazard[s.base], from, to))
}

// outlive counts the stays, and returns the sum of the reuses that were expected in them.
func outlive(row *[buckets]uint16, stays *[buckets]uint64, hazard *[buckets]uint32, from, to uint8) uint64 {
	var sum uint64
	for b := from; b < to; b++ {
		e := uint64(row[b])
		stays[b] += e
		sum += e * uint64(hazard[b])
	}
	return sum / weightOne
}

// forgotten records a segment that is dropped without a reuse. It counts as half a stay in its bucket.
func (m *model) forgotten(s *segment) {
	e := uint64(m.effective[s.row()][s.bucket]) / 2
	m.stays[s.base][s.bucket] += e
	m.expect(s, e*uint64(m.hazard[s.base][s.bucket])/weightOne)
	m.end(basePart(s.base), 0)
}

// reused records a segment that a request has met again.
func (m *model) reused(s *segment) {
	m.aged(s, s.bucket, s.bucket+1)
	m.reuses[s.base][s.bucket] += weightOne
	p := basePart(s.base)
	if p < partLeft {
		for f, v := range s.feature {
			m.seen[p][f][v] += one
		}
	}
	m.end(p, 1)
}

// end counts a segment that has ended. It halves the part's counts if there are many.
func (m *model) end(part int, reuses uint32) {
	m.events[part] += reuses
	m.ended[part]++
	if m.events[part] >= memory || m.ended[part] >= lifetimes {
		m.halve(part)
	}
}

// expect records reuses that were expected of a segment.
func (m *model) expect(s *segment, e uint64) {
	if p := basePart(s.base); p < partLeft {
		for f, v := range s.feature {
			m.expected[p][f][v] += e * uint64(m.inverse[p][f][v]) / weightOne
		}
	}
}

// halve halves the counts of a part, so that older events count less.
func (m *model) halve(part int) {
	m.events[part] /= 2
	m.ended[part] /= 2
	for base := range m.stays {
		if basePart(uint8(base)) != part {
			continue
		}
		for b := range m.stays[base] {
			m.stays[base][b] /= 2
			m.reuses[base][b] /= 2
		}
	}
	if part < partLeft {
		for f := range m.seen[part] {
			for v := range m.seen[part][f] {
				m.seen[part][f][v] /= 2
				m.expected[part][f][v] /= 2
			}
		}
	}
}

// level returns the weight level of a segment's features.
func (m *model) level(s *segment) uint8 {
	p := basePart(s.base)
	if p >= partLeft {
		return levelOne
	}
	var sum int32
	for f, v := range s.feature {
		sum += m.weight[p][f][v]
	}
	l := (2*sum+lgOne/2)>>lgBits + levelOne // two levels per octave
	return uint8(max(0, min(levels-1, l)))
}
