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
}

func newLevelTimes(g *LevelGrid) *levelTimes {
	return &levelTimes{levels: g.Levels, chunk: g.ChunkBytes, of: make([][]float64, len(g.Levels))}
}

// add adds the loads of a request: how many chunks from each level.
func (t *levelTimes) add(counts []int) {
	sum, bytes := 0.0, int64(0)
	for n, count := range counts {
		if count > 0 {
			part := int64(count) * t.chunk
			s := t.levels[n].seconds(part)
			t.of[n] = append(t.of[n], s)
			sum, bytes = sum+s, bytes+part
		}
	}
	if bytes > 0 {
		t.all = append(t.all, sum)
		t.nearest = append(t.nearest, t.levels[0].seconds(bytes))
		t.farthest = append(t.farthest, t.levels[len(t.levels)-1].seconds(bytes))
	}
}
