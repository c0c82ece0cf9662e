package pathbench

import (
	"fmt"
	"html"
	"io"
	"math"
	"slices"
	"strings"
)

// The plot is SVG: for each geometry and path a bar per pass, as long as its ratio, with the quartiles as a line at its end.
// A line stands where the smaller ceiling is. Colours stand out on light and dark grounds; the rest follows the viewer's
// colour scheme.
const (
	plotWidth = 860.0
	plotLeft  = 250.0 // where the ratios begin
	plotRight = 730.0 // where they end
	barStep   = 17.0
	barHeight = 11.0
	bandGap   = 14.0 // between paths
)

var passColours = []string{"#2f7fd6", "#e0631a", "#1f9d55", "#8a63d2"}

const plotStyle = `
  .kv { font: 12px system-ui, -apple-system, "Segoe UI", sans-serif; }
  .kv .ground { fill: #ffffff } .kv text { fill: #3b4350 } .kv .title { font-size: 15px; font-weight: 600; fill: #161b22 }
  .kv .quiet { fill: #6b7480 } .kv .grid { stroke: #e4e7eb } .kv .ceiling { stroke: #3b4350; stroke-width: 1.5 }
  .kv .spread { stroke: #161b22; stroke-width: 1.5 }
  @media (prefers-color-scheme: dark) {
    .kv .ground { fill: #11161d } .kv text { fill: #c3cad3 } .kv .title { fill: #eef2f6 } .kv .quiet { fill: #8a939e }
    .kv .grid { stroke: #262d36 } .kv .ceiling { stroke: #c3cad3 } .kv .spread { stroke: #eef2f6 }
  }
`

// WriteSVG draws the ratios of rows by path.
func WriteSVG(w io.Writer, rows []Row) error {
	var b strings.Builder
	var passes []string
	most := 1.0
	for i := range rows {
		most = max(most, rows[i].Ratio.High)
		if !slices.Contains(passes, rows[i].Pass) {
			passes = append(passes, rows[i].Pass)
		}
	}
	most = math.Ceil(most*5) / 5
	p := plot{passes: passes, most: most, y: 70}
	for i := range rows {
		if i == 0 || rows[i].Pages != rows[i-1].Pages {
			p.heading(rows[i].Pages)
		}
		if i == 0 || !samePath(&rows[i], &rows[i-1]) {
			p.path(&rows[i])
		}
		p.bar(&rows[i])
	}
	height := p.y + 36
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" class="kv" viewBox="0 0 %g %g" width="%g" height="%g" role="img">`+"\n",
		plotWidth, height, plotWidth, height)
	title := "Ours over the smaller ceiling of the same round"
	if len(rows) > 0 && rows[0].Alone != nil {
		title = "Clients together over one alone"
	}
	fmt.Fprintf(&b, "<title>%s</title>\n<style>%s</style>\n", title, plotStyle)
	fmt.Fprintf(&b, `<rect class="ground" width="%g" height="%g" rx="8"/>`+"\n", plotWidth, height)
	fmt.Fprintf(&b, `<text class="title" x="24" y="28">%s</text>`+"\n", title)
	for i, pass := range passes {
		x := 24 + float64(i)*120
		fmt.Fprintf(&b, `<rect x="%g" y="41" width="11" height="11" style="fill:%s"/><text x="%g" y="51">%s</text>`+"\n", x,
			passColours[i%len(passColours)], x+17, html.EscapeString(pass))
	}
	for tick := range int(math.Round(most*5)) + 1 {
		v := float64(tick) / 5
		class := "grid"
		if tick == 5 {
			class = "ceiling"
		}
		fmt.Fprintf(&b, `<line class="%s" x1="%.1f" x2="%.1f" y1="64" y2="%g"/>`, class, p.x(v), p.x(v), p.y+6)
		fmt.Fprintf(&b, `<text class="quiet" x="%.1f" y="%g" text-anchor="middle">%.1f</text>`+"\n", p.x(v), p.y+22, v)
	}
	b.WriteString(p.out.String())
	b.WriteString("</svg>\n")
	_, err := io.WriteString(w, b.String())
	return err
}

func samePath(a, b *Row) bool {
	return a.Pages == b.Pages && a.Memory == b.Memory && a.Files == b.Files && a.Route == b.Route && a.Through == b.Through &&
		a.Compression == b.Compression
}

// plot is what has been drawn, down to y.
type plot struct {
	passes []string
	most   float64 // the largest ratio that there is room for
	y      float64
	out    strings.Builder
}

func (p *plot) x(ratio float64) float64 { return plotLeft + (plotRight-plotLeft)*ratio/p.most }

func (p *plot) heading(pages string) {
	p.y += 2 * bandGap
	fmt.Fprintf(&p.out, `<text class="title" x="24" y="%g">%s</text>`+"\n", p.y, html.EscapeString(pages))
}

// path begins a path: the root and what it is, then the route and who stores and loads.
func (p *plot) path(r *Row) {
	p.y += bandGap
	says := fmt.Sprintf("%s, through %s", r.Route, r.Through)
	if r.Compression != "" && r.Compression != off {
		says += ", " + r.Compression
	}
	fmt.Fprintf(&p.out, `<text x="24" y="%g">%s</text><text class="quiet" x="24" y="%g">%s</text>`+"\n", p.y+barHeight-1,
		html.EscapeString(r.Files), p.y+barHeight+14, html.EscapeString(says))
}

func (p *plot) bar(r *Row) {
	says := fmt.Sprintf("%s, %s: %s of the ceiling, %.1f GB/s", r.Files, r.Pass, r.Ratio, r.Ours)
	if r.Alone != nil {
		says = fmt.Sprintf("%s, %s: %s times one alone, %.1f GB/s", r.Files, r.Pass, r.Ratio, r.Ours)
	}
	at := slices.Index(p.passes, r.Pass)
	fmt.Fprintf(&p.out, `<g><title>%s</title><rect x="%g" y="%g" width="%.1f" height="%g" style="fill:%s"/>`,
		html.EscapeString(says), plotLeft, p.y, p.x(r.Ratio.Mid)-plotLeft, barHeight, passColours[at%len(passColours)])
	fmt.Fprintf(&p.out, `<line class="spread" x1="%.1f" x2="%.1f" y1="%g" y2="%g"/>`, p.x(r.Ratio.Low), p.x(r.Ratio.High),
		p.y+barHeight/2, p.y+barHeight/2)
	fmt.Fprintf(&p.out, `<text x="%g" y="%g">%.2f, %.1f GB/s</text></g>`+"\n", plotRight+12, p.y+barHeight-1, r.Ratio.Mid, r.Ours)
	p.y += barStep
}
