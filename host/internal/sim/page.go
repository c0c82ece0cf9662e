package sim

import (
	"fmt"
	"html"
	"io"
	"strings"
)

const pageStyle = `
:root { color-scheme: light dark }
body { font: 14px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; margin: 2rem auto; max-width: 1300px; padding: 0 1rem }
h1 { font-size: 1.3rem } h2 { font-size: 1.05rem; margin-top: 2rem }
svg { max-width: 100%; height: auto }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .8rem; text-align: right; border-bottom: 1px solid color-mix(in srgb, currentColor 15%, transparent) }
th:first-child, td:first-child { text-align: left }
td.best { font-weight: 700 }
.series { transition: opacity .12s }
svg:has(.series:hover) .series:not(:hover) { opacity: .18 }
`

// WriteHTML writes a self-contained page: the plot, where pointing at a curve dims the others, and all figures as
// tables.
func (o *Outcome) WriteHTML(out io.Writer) error {
	var b strings.Builder
	b.WriteString("<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" content=\"width=device-width\">\n")
	fmt.Fprintf(&b, "<title>kvhost sim</title>\n<style>%s</style>\n<h1>Miss ratio by capacity</h1>\n", pageStyle)
	b.WriteString(o.svg())
	g := o.grid
	for i, w := range g.Workloads {
		fmt.Fprintf(&b, "<h2>%s</h2>\n<p>%s requests, %s accesses to %s chunks; %s. Prefill of everything: %s.</p>\n",
			html.EscapeString(w.Name),
			thousands(w.Requests()), thousands(w.Accesses()), thousands(w.Unique()), g.Options.Order,
			hours(o.At(i, 0, 0).RecomputeSeconds))
		o.pageTable(&b, i, "miss ratio", false, func(r *Result) float64 { return r.MissRatio }, "%.4f")
		o.pageTable(&b, i, "prefix hit ratio", true, func(r *Result) float64 { return r.PrefixHitRatio }, "%.4f")
		o.pageTable(&b, i, "prefill saved, %", true, func(r *Result) float64 { return 100 * r.SavedRatio }, "%.2f")
	}
	b.WriteString("</html>\n")
	_, err := io.WriteString(out, b.String())
	return err
}

// pageTable marks the best policy of each column. Baselines do not compete.
func (o *Outcome) pageTable(b *strings.Builder, workload int, title string, high bool, value func(*Result) float64,
	format string) {
	g := o.grid
	fmt.Fprintf(b, "<div class=\"scroll\"><table>\n<tr><th>%s</th>", title)
	for _, c := range g.Capacities {
		fmt.Fprintf(b, "<th>%s</th>", html.EscapeString(c.String()))
	}
	b.WriteString("</tr>\n")
	for j, p := range g.Policies {
		fmt.Fprintf(b, "<tr><td>%s</td>", html.EscapeString(p.Label))
		for k := range g.Capacities {
			class := ""
			if p.module != nil && o.best(workload, j, k, high, value) {
				class = ` class="best"`
			}
			fmt.Fprintf(b, "<td%s>"+format+"</td>", class, value(o.At(workload, j, k)))
		}
		b.WriteString("</tr>\n")
	}
	b.WriteString("</table></div>\n")
}

func (o *Outcome) best(workload, pol, capacity int, high bool, value func(*Result) float64) bool {
	v := value(o.At(workload, pol, capacity))
	for j, p := range o.grid.Policies {
		other := value(o.At(workload, j, capacity))
		if p.module != nil && (high && other > v || !high && other < v) {
			return false
		}
	}
	return true
}
