package sim

import "slices"

// Times are of loads, in seconds.
type Times struct {
	Mean   float64 `json:"mean"`
	Median float64 `json:"p50"`
	P99    float64 `json:"p99"`
}

// timesOf adds up times and sorts them.
func timesOf(list []float64) (sum float64, t Times) {
	if len(list) == 0 {
		return 0, t
	}
	for _, s := range list {
		sum += s
	}
	slices.Sort(list)
	return sum, Times{sum / float64(len(list)), list[len(list)/2], list[len(list)*99/100]}
}

// levelTimes are what the loads of each request take: those of one level together, and one level after the other.
type levelTimes struct {
	levels []Level
	chunk  int64
	of     [][]float64 // by level
	all    []float64
	// As if all were loaded from one level.
	nearest, farthest []float64
	counts            []int64
}

func newLevelTimes(g *LevelGrid) *levelTimes {
	return &levelTimes{levels: g.Levels, chunk: g.ChunkBytes, of: make([][]float64, len(g.Levels)), counts: make([]int64, len(g.Levels))}
}

// add adds the loads of a request.
func (t *levelTimes) add(loaded []load) {
	if len(loaded) == 0 {
		return
	}
	clear(t.counts)
	for _, l := range loaded {
		t.counts[l.level]++
	}
	sum := 0.0
	for n, count := range t.counts {
		if count > 0 {
			s := t.levels[n].seconds(count * t.chunk)
			t.of[n] = append(t.of[n], s)
			sum += s
		}
	}
	bytes := int64(len(loaded)) * t.chunk
	t.all = append(t.all, sum)
	t.nearest = append(t.nearest, t.levels[0].seconds(bytes))
	t.farthest = append(t.farthest, t.levels[len(t.levels)-1].seconds(bytes))
}
