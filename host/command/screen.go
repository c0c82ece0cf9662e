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

	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/observe"
	"github.com/kvhost/kvhost/host/internal/plain"
	"github.com/kvhost/kvhost/host/internal/proto"

	protobuf "google.golang.org/protobuf/proto"
)

// mostListed bounds the rows of a table on the screen.
const mostListed = 12

// drawScreen draws a host's status. before is an earlier one of the same host, for rates.
func drawScreen(before, now *proto.StatusResponse) string {
	now = seen(now)
	var b strings.Builder
	perSecond := func(read func(*proto.StatusResponse) uint64) float64 { return observe.PerSecond(before, now, read) }
	ready := "ready"
	if len(now.NotReady) > 0 {
		ready = "NOT READY"
	}
	fmt.Fprintf(&b, "kvhost %s  up %s  %s\n", now.Version, now.Uptime.AsDuration().Truncate(time.Second), ready)
	for _, why := range now.NotReady {
		fmt.Fprintf(&b, "  %s\n", why)
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

// bad is what a line has that an operator is to see first.
var bad = regexp.MustCompile(`NOT READY|  (out|full|read only|quarantine)( |,)| is (out|full|read only): `)

// seen is a status with each text on one line that a terminal shows as it is: engines, models, paths and the words of peers are others' choice.
func seen(now *proto.StatusResponse) *proto.StatusResponse {
	now = protobuf.Clone(now).(*proto.StatusResponse)
	var all func(protoreflect.Message)
	all = func(m protoreflect.Message) {
		m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
			switch text := f.Kind() == protoreflect.StringKind; {
			case f.IsMap():
			case f.IsList():
				for i, list := 0, v.List(); i < list.Len(); i++ {
					if text {
						list.Set(i, protoreflect.ValueOfString(plain.Line(list.Get(i).String())))
					} else if f.Message() != nil {
						all(list.Get(i).Message())
					}
				}
			case text:
				m.Set(f, protoreflect.ValueOfString(plain.Line(v.String())))
			case f.Message() != nil:
				all(v.Message())
			}
			return true
		})
	}
	all(now.ProtoReflect())
	return now
}

// paint makes a line red that says something bad, where lines are for a terminal that shows colours.
func paint(line string) string {
	if os.Getenv("NO_COLOR") != "" || os.Getenv("TERM") == "dumb" || !bad.MatchString(line) {
		return line
	}
	return "\x1b[31m" + line + "\x1b[39m"
}

// writeTable writes so many rows of a table, and nothing when it has none. Under it stands why rows are in their state.
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
			if c.Part {
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
			fmt.Fprintf(b, "%s is %s: %s\n\n", r.Cells[0], state, r.Why)
		}
	}
}

func count(name string) func(*proto.StatusResponse) uint64 {
	return func(s *proto.StatusResponse) uint64 { return s.Counters[name] }
}

// moved reads the bytes that moved in a direction.
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

// bar draws ten characters of which a percentage is full.
func bar(percent string) string {
	part, _ := strconv.ParseFloat(strings.TrimSuffix(percent, "%"), 64) // nothing, where there is no whole
	n := min(10, int(part/10+0.5))
	return "[" + strings.Repeat("#", n) + strings.Repeat(".", 10-n) + "]"
}
