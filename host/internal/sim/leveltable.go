package sim

import (
	"fmt"
	"io"
	"strings"

	"github.com/kvhost/kvhost/host/internal/config"
)

// WriteTable prints the results: for each workload one block of totals, and one for each level.
func (o *LevelOutcome) WriteTable(out io.Writer) error {
	g := o.grid
	var b strings.Builder
	for i, w := range g.Workloads {
		results := o.Results[i*g.rows() : (i+1)*g.rows()]
		fmt.Fprintf(&b, "%s: %d requests, %d accesses to %d chunks of %s\n\n", w.Name, w.Requests(), w.Accesses(),
			w.Unique(), config.DecimalText(g.ChunkBytes))
		farthest := len(g.Levels) - 1
		rows := [][]string{{"all levels", "hit ratio", "prefix hits", "loaded", "written", "written below 0", "prefill saved",
			"loading", "saved", fmt.Sprintf("over level %d", farthest), "load p50", "p99", "p99 prefetched"}}
		for j := range results {
			r := &results[j]
			rows = append(rows, []string{
				o.label(j), fmt.Sprintf("%.4f", 1-r.MissRatio), fmt.Sprintf("%.4f", r.PrefixHitRatio), config.DecimalText(r.BytesLoaded),
				config.DecimalText(r.BytesWritten), config.DecimalText(r.BytesWritten - r.Levels[0].BytesWritten), seconds(r.PrefillSeconds),
				seconds(r.LoadSeconds), seconds(r.SavedSeconds), seconds(r.FartherSeconds),
				seconds(r.LoadTimes.Median), seconds(r.LoadTimes.P99), seconds(r.PrefetchedTimes.P99),
			})
		}
		align(&b, rows)
		for n, l := range g.Levels {
			title := fmt.Sprintf("level %d: %d chunks, %g GB/s", n, results[0].Levels[n].Capacity, l.BytesPerSecond/1e9)
			if l.Latency > 0 {
				title += " after " + l.Latency.String()
			}
			if l.Policy != nil {
				title += ", " + l.Policy.Label
			}
			rows = [][]string{{title, "hits", "loaded", "of all", "written", "new", "demoted to it", "promoted to it", "copies shed",
				"covered", "dropped", "load mean", "p99"}}
			for j := range results {
				r, f := &results[j], &results[j].Levels[n]
				rows = append(rows, []string{
					o.label(j), fmt.Sprint(f.Hits), config.DecimalText(f.BytesLoaded), share(f.BytesLoaded, r.BytesLoaded),
					config.DecimalText(f.BytesWritten),
					fmt.Sprint(f.New), fmt.Sprint(f.Demotions), fmt.Sprint(f.Promotions), fmt.Sprint(f.CopiesShed), fmt.Sprint(f.Covered), fmt.Sprint(f.Drops),
					seconds(f.LoadTimes.Mean), seconds(f.LoadTimes.P99),
				})
			}
			align(&b, rows)
		}
		for j := range results {
			for n, f := range results[j].Levels {
				if f.Shed > 0 {
					fmt.Fprintf(&b, "%s: %d chunks were not stored in level %d because the policy freed too little\n",
						o.label(j), f.Shed, n)
				}
			}
		}
	}
	_, err := io.WriteString(out, b.String())
	return err
}

// label names a row: what is the same in all rows is left out.
func (o *LevelOutcome) label(row int) string {
	g := o.grid
	p, admit, write := g.cell(row)
	text := p.Label
	if len(g.Admissions) > 1 {
		text += ", admit " + admit.Label
	}
	if len(g.Writes) > 1 {
		text += ", " + writes[write]
	}
	return text
}

func share(part, whole int64) string {
	if whole == 0 {
		return "-"
	}
	return fmt.Sprintf("%.1f %%", 100*float64(part)/float64(whole))
}
