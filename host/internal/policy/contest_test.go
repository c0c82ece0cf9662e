package policy

import (
	"slices"
	"testing"
	"time"
)

// side is one of the things that a benchmark compares: work does a fixed number of units of it.
type side struct {
	name string
	work func()
}

// contest runs the sides in turns, a round of each per iteration, so that what else the machine does hits them alike.
// Of each side it reports the fastest round, which is what the code costs when nothing disturbs it, and the median,
// both in nanoseconds per unit. Run it with -benchtime 1000x or so: the time per iteration means nothing.
func contest(b *testing.B, units int, sides ...side) {
	b.Helper()
	rounds := make([][]time.Duration, len(sides))
	for b.Loop() {
		for i, s := range sides {
			start := time.Now()
			s.work()
			rounds[i] = append(rounds[i], time.Since(start))
		}
	}
	for i, s := range sides {
		slices.Sort(rounds[i])
		b.ReportMetric(float64(rounds[i][0])/float64(units), s.name+"-best-ns")
		b.ReportMetric(float64(rounds[i][len(rounds[i])/2])/float64(units), s.name+"-median-ns")
	}
}
