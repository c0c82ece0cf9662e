package command

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/observe"
	"github.com/kvhost/kvhost/host/internal/plain"
	"github.com/kvhost/kvhost/host/internal/proto"
)

// mostListed is the maximum number of rows of a table on the screen.
const mostListed = 12

// drawScreen returns a host's status as text. before is an earlier status of the same host, for rates. Names of engines and models,
// paths, and messages of peers are chosen by others: each is made safe to show, on a line of its own.
func drawScreen(before, now *proto.StatusResponse) string {
	var b strings.Builder
	perSecond := func(read func(*proto.StatusResponse) uint64) float64 { return observe.PerSecond(before, now, read) }
	ready := "ready"
	if len(now.NotReady) > 0 {
		ready = "NOT READY"
	}
	fmt.Fprintf(&b, "kvhost %s  up %s  %s\n", plain.Line(now.Version), now.Uptime.AsDuration().Truncate(time.Second), ready)
	for _, why := range now.NotReady {
		fmt.Fprintf(&b, "  %s\n", plain.Line(why))
	}
	keys, hits := count("lookup_keys"), count("lookup_hits")
	fmt.Fprintf(&b, "hit ratio %s (now %s)  lookups %.0f/s  loads %s  stores %s\n", observe.Percent(hits(now), keys(now)),
		observe.Percent(hits(now)-min(hits(now), hits(before)), keys(now)-min(keys(now), keys(before))), perSecond(count("lookups")),
		observe.Speed(perSecond(moved(proto.Direction_DIRECTION_LOAD))), observe.Speed(perSecond(moved(proto.Direction_DIRECTION_STORE))))
	fmt.Fprintf(&b, "sessions %d of %d engines  leases %d  jobs %d  client memory %s\n\n", now.Sessions, now.Engines, now.Leases,
		now.Jobs, config.SizeText(now.ArenaBytes))
	for _, t := range observe.Tables(before, now) {
		writeTable(&b, &t, mostListed)
	}
	return b.String()
}

// bad matches lines that the operator should see first.
var bad = regexp.MustCompile(`NOT READY|  (out|full|read only|quarantine)( |,)| is (out|full|read only): `)

// paint makes a line red if it matches bad and the terminal shows colours.
func paint(line string) string {
	if os.Getenv("NO_COLOR") != "" || os.Getenv("TERM") == "dumb" || !bad.MatchString(line) {
		return line
	}
	return "\x1b[31m" + line + "\x1b[39m"
}

// writeTable writes at most the given number of rows of a table, followed by the reasons for their state. It writes nothing for
// an empty table.
func writeTable(b *strings.Builder, t *observe.Table, most int) {
	if len(t.Rows) == 0 {
		return
	}
	w := tabwriter.NewWriter(b, 0, 0, 2, ' ', 0)
	var titles []string
	for _, c := range t.Columns {
		titles = append(titles, strings.ToUpper(c.Title))
	}
	fmt.Fprintln(w, strings.Join(titles, "\t"))
	for _, r := range t.Rows[:min(len(t.Rows), most)] {
		for i, c := range t.Columns {
			if r.Cells[i] = plain.Line(r.Cells[i]); c.Part {
				r.Cells[i] = bar(r.Cells[i])
			}
		}
		fmt.Fprintln(w, strings.Join(r.Cells, "\t"))
	}
	w.Flush()
	if more := len(t.Rows) - most; more > 0 {
		fmt.Fprintf(b, "... and %d more: kvhost status --json\n", more)
	}
	b.WriteByte('\n')
	for _, r := range t.Rows {
		if r.Why != "" {
			state, _, _ := strings.Cut(r.Cells[slices.IndexFunc(t.Columns, func(c observe.Column) bool { return c.Title == "state" })], ",")
			fmt.Fprintf(b, "%s is %s: %s\n\n", plain.Line(r.Cells[0]), state, plain.Line(r.Why))
		}
	}
}

func count(name string) func(*proto.StatusResponse) uint64 {
	return func(s *proto.StatusResponse) uint64 { return s.Counters[name] }
}

// moved returns a function that reads the bytes that moved in a direction.
func moved(direction proto.Direction) func(*proto.StatusResponse) uint64 {
	return func(s *proto.StatusResponse) (n uint64) {
		for _, r := range s.Routes {
			if r.Direction == direction {
				n += r.Bytes
			}
		}
		return n
	}
}

// bar draws a percentage as a bar of ten characters.
func bar(percent string) string {
	part, _ := strconv.ParseFloat(strings.TrimSuffix(percent, "%"), 64) // 0 if there is no percentage
	n := min(10, int(part/10+0.5))
	return "[" + strings.Repeat("#", n) + strings.Repeat(".", 10-n) + "]"
}
