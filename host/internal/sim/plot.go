package sim

import (
	"cmp"
	"fmt"
	"html"
	"io"
	"math"
	"slices"
	"strings"
)

// The plot is SVG: one panel per workload, x the capacity, y the miss ratio, and a label at each curve instead of a
// legend. Colours have medium lightness, so that they stand out on light and dark backgrounds; the rest follows the
// viewer's colour
// scheme.
const (
	panelWidth  = 620.0
	panelHeight = 430.0
	marginTop   = 64.0
	marginLeft  = 64.0
	marginRight = 128.0
	marginFoot  = 52.0
	labelStep   = 14.0
)

var colours = []string{
	"#2f7fd6", "#e0631a", "#1f9d55", "#d6347f", "#8a63d2", "#0f9fb0", "#b8860b", "#dd3b3b",
	"#6a9a1f", "#5b74d8", "#c05fc0", "#12a386", "#a9714b", "#7a8794",
}

const plotStyle = `
  .kv { font: 12px system-ui, -apple-system, "Segoe UI", sans-serif; }
  .kv .ground { fill: #ffffff } .kv text { fill: #3b4350 } .kv .title { font-size: 15px; font-weight: 600; fill: #161b22 }
  .kv .quiet { fill: #6b7480 } .kv .grid { stroke: #e4e7eb } .kv .axis { stroke: #9aa3ad }
  .kv .curve { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round }
  .kv .yard { stroke: #6b7480; stroke-dasharray: 5 4; stroke-width: 1.5 } .kv .leader { stroke-width: 1; opacity: .45 }
  .kv .label { font-weight: 600 } .kv .halo { stroke: #ffffff; stroke-width: 1.5 }
  @media (prefers-color-scheme: dark) {
    .kv .ground { fill: #11161d } .kv text { fill: #c3cad3 } .kv .title { fill: #eef2f6 } .kv .quiet { fill: #8a939e }
    .kv .grid { stroke: #262d36 } .kv .axis { stroke: #56606b } .kv .yard { stroke: #8a939e } .kv .halo { stroke: #11161d }
  }
`

// WriteSVG draws the miss-ratio curves.
func (o *Outcome) WriteSVG(out io.Writer) error {
	_, err := io.WriteString(out, o.svg())
	return err
}

func (o *Outcome) svg() string {
	var b strings.Builder
	columns := min(2, len(o.grid.Workloads))
	rows := (len(o.grid.Workloads) + columns - 1) / columns
	width, height := panelWidth*float64(columns), panelHeight*float64(rows)
	fmt.Fprintf(&b,
		`<svg xmlns="http://www.w3.org/2000/svg" class="kv" viewBox="0 0 %g %g" width="%g" height="%g" role="img">`+"\n", width, height, width, height)
	fmt.Fprintf(&b, "<title>Miss ratio by capacity</title>\n<style>%s</style>\n", plotStyle)
	fmt.Fprintf(&b, `<rect class="ground" width="%g" height="%g" rx="8"/>`+"\n", width, height)
	for i := range o.grid.Workloads {
		fmt.Fprintf(&b, `<g transform="translate(%g %g)">`+"\n", panelWidth*float64(i%columns),
			panelHeight*float64(i/columns))
		o.panel(i).draw(&b)
		b.WriteString("</g>\n")
	}
	b.WriteString("</svg>\n")
	return b.String()
}

// panel is one workload's curves in numbers.
type panel struct {
	title, subtitle, below string
	ticks                  []string // of the capacities
	x, y                   scale
	curves                 []curve
}

type curve struct {
	label  string
	colour string
	yard   bool
	points []point
}

type point struct {
	x, y float64 // pixels
	text string
}

func (o *Outcome) panel(workload int) *panel {
	g := o.grid
	w := g.Workloads[workload]
	p := &panel{
		title:    w.Name,
		subtitle: fmt.Sprintf("%s accesses, %s chunks", thousands(w.Accesses()), thousands(w.Unique())),
		below:    "capacity",
	}
	var xs, ys []float64
	for k, c := range g.Capacities {
		xs = append(xs, float64(o.At(workload, 0, k).Capacity))
		p.ticks = append(p.ticks, c.String())
		if c.share != nil {
			p.below = "capacity, share of all chunks"
		}
	}
	for j := range g.Policies {
		for k := range g.Capacities {
			ys = append(ys, o.At(workload, j, k).MissRatio)
		}
	}
	p.x = newScale(xs, marginLeft, panelWidth-marginRight, 8)
	p.y = newScale(ys, panelHeight-marginFoot, marginTop, 6)
	colour := 0
	for j, pol := range g.Policies {
		c := curve{label: pol.Label, yard: pol.module == nil}
		if !c.yard {
			c.colour = colours[colour%len(colours)]
			colour++
		}
		for k := range g.Capacities {
			r := o.At(workload, j, k)
			c.points = append(c.points, point{
				p.x.at(float64(r.Capacity)), p.y.at(r.MissRatio),
				fmt.Sprintf("%s at %s: %.4f", pol.Label, g.Capacities[k], r.MissRatio),
			})
		}
		slices.SortFunc(c.points, func(a, b point) int { return cmp.Compare(a.x, b.x) })
		p.curves = append(p.curves, c)
	}
	return p
}

func thousands(n int) string {
	s := fmt.Sprint(n)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

func (p *panel) draw(b *strings.Builder) {
	right, foot := panelWidth-marginRight, panelHeight-marginFoot
	fmt.Fprintf(b,
		`<text class="title" x="%g" y="26">%s</text><text class="quiet" x="%g" y="44">miss ratio; %s</text>`+"\n",
		marginLeft-40, html.EscapeString(p.title), marginLeft-40, p.subtitle)
	for _, v := range p.y.ticks() {
		y := p.y.at(v)
		fmt.Fprintf(b,
			`<line class="grid" x1="%g" x2="%g" y1="%.1f" y2="%.1f"/><text class="quiet" x="%g" y="%.1f" text-anchor="end">%s</text>`+"\n",
			marginLeft, right, y, y, marginLeft-8, y+4, number(v))
	}
	last := math.Inf(-1)
	for i, text := range p.ticks {
		x := p.curves[0].points[min(i, len(p.curves[0].points)-1)].x
		fmt.Fprintf(b, `<line class="axis" x1="%.1f" x2="%.1f" y1="%g" y2="%g"/>`, x, x, foot, foot+5)
		if x-last > 34 {
			fmt.Fprintf(b, `<text x="%.1f" y="%g" text-anchor="middle">%s</text>`+"\n", x, foot+20,
				html.EscapeString(text))
			last = x
		}
	}
	fmt.Fprintf(b,
		`<line class="axis" x1="%g" x2="%g" y1="%g" y2="%g"/><text class="quiet" x="%g" y="%g" text-anchor="middle">%s</text>`+"\n",
		marginLeft, right, foot, foot, (marginLeft+right)/2, foot+40, p.below)
	places := p.labels()
	for i, c := range p.curves {
		p.drawCurve(b, &c, places[i])
	}
}

func (p *panel) drawCurve(b *strings.Builder, c *curve, labelY float64) {
	class, colour := "curve", fmt.Sprintf(` style="stroke:%s"`, c.colour)
	if c.yard {
		class, colour = "curve yard", ""
	}
	var line strings.Builder
	for i, pt := range c.points {
		fmt.Fprintf(&line, "%s%.1f %.1f", [2]string{"M", " L"}[min(i, 1)], pt.x, pt.y)
	}
	fmt.Fprintf(b, `<g class="series"><path class="%s"%s d="%s"/>`, class, colour, line.String())
	fill := "fill:" + c.colour
	if c.yard {
		fill = "fill:#808994"
	}
	for _, pt := range c.points {
		fmt.Fprintf(b, `<circle class="halo" cx="%.1f" cy="%.1f" r="3.2" style="%s"><title>%s</title></circle>`, pt.x,
			pt.y, fill, html.EscapeString(pt.text))
	}
	end := c.points[len(c.points)-1]
	x := panelWidth - marginRight + 22
	fmt.Fprintf(b, `<path class="curve leader" style="stroke:%s" d="M%.1f %.1f L%.1f %.1f"/>`,
		strings.TrimPrefix(fill, "fill:"), end.x+5, end.y, x-4, labelY)
	fmt.Fprintf(b, `<text class="label" x="%.1f" y="%.1f" style="%s">%s</text></g>`+"\n", x, labelY+4, fill,
		html.EscapeString(c.label))
}

// labels spreads the curves' labels along the right edge, in the order in which the curves end; where they end
// together, in the order of the last point where they differ.
func (p *panel) labels() []float64 {
	order := make([]int, len(p.curves))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int {
		pa, pb := p.curves[a].points, p.curves[b].points
		for k := len(pa) - 1; k >= 0; k-- {
			if d := pa[k].y - pb[k].y; math.Abs(d) > 2 {
				return cmp.Compare(pa[k].y, pb[k].y)
			}
		}
		return 0
	})
	ys := make([]float64, len(order))
	for i, c := range order {
		pts := p.curves[c].points
		ys[i] = pts[len(pts)-1].y
	}
	// Groups of labels that would overlap are centred on their curves' ends.
	type group struct{ from, to int }
	var groups []group
	middle := func(g group) float64 {
		sum := 0.0
		for _, y := range ys[g.from:g.to] {
			sum += y
		}
		n := float64(g.to - g.from)
		half := (n - 1) / 2 * labelStep
		return min(max(sum/n, marginTop+half), panelHeight-marginFoot-half)
	}
	for i := range ys {
		groups = append(groups, group{i, i + 1})
		for len(groups) > 1 {
			a, z := groups[len(groups)-2], groups[len(groups)-1]
			apart := float64(a.to-a.from+z.to-z.from) / 2 * labelStep
			if middle(z)-middle(a) >= apart {
				break
			}
			groups = append(groups[:len(groups)-2], group{a.from, z.to})
		}
	}
	places := make([]float64, len(order))
	for _, g := range groups {
		top := middle(g) - float64(g.to-g.from-1)/2*labelStep
		for i := g.from; i < g.to; i++ {
			places[order[i]] = top + float64(i-g.from)*labelStep
		}
	}
	return places
}
