package command

import (
	"cmp"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/kvhost/kvhost/host/internal/config"
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
	since := (now.Uptime.AsDuration() - before.Uptime.AsDuration()).Seconds()
	perSecond := func(read func(*proto.StatusResponse) uint64) float64 {
		if since <= 0 || read(now) < read(before) { // another process
			return 0
		}
		return float64(read(now)-read(before)) / since
	}
	ready := "ready"
	if len(now.NotReady) > 0 {
		ready = "NOT READY"
	}
	fmt.Fprintf(&b, "kvhost %s  up %s  %s\n", now.Version, now.Uptime.AsDuration().Truncate(time.Second), ready)
	for _, why := range now.NotReady {
		fmt.Fprintf(&b, "  %s\n", why)
	}
	keys, hits := count("lookup_keys"), count("lookup_hits")
	fmt.Fprintf(&b, "hit ratio %s (now %s)  lookups %.0f/s  loads %s  stores %s\n",
		percent(hits(now), keys(now)), percent(hits(now)-min(hits(now), hits(before)), keys(now)-min(keys(now), keys(before))),
		perSecond(count("lookups")), speedText(perSecond(moved(proto.Direction_DIRECTION_LOAD))), speedText(perSecond(moved(proto.Direction_DIRECTION_STORE))))
	fmt.Fprintf(&b, "sessions %d of %d engines  leases %d  jobs %d  client memory %s\n\n", now.Sessions, now.Engines, now.Leases,
		now.Jobs, config.SizeText(now.ArenaBytes))

	table(&b, "ROOT\tSTATE\tFILL\tUSED\tCAPACITY\tENTRIES\tEVICTIONS\tSHEDS\tDAMAGED\tOUTAGES", now.Roots,
		func(w io.Writer, r *proto.RootStatus) {
			state := word(r.State)
			if r.Scanning {
				state += ", scanning"
			}
			fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%d\t%d\t%d\t%d\t%d\n", r.Path, state, bar(r.Used, r.Capacity), config.SizeText(r.Used),
				config.SizeText(r.Capacity), r.Entries, r.Evictions, r.Sheds, r.Damaged, r.Outages)
		})
	table(&b, "PEER\tSTATE\tENTRIES\tASKS\tFAILURES\tSTRUCK OUT\tREAD\tBY NIXL\tOFFERED\tTAKEN\tBLAMED", now.Peers, func(w io.Writer, p *proto.PeerStatus) {
		fmt.Fprintf(w, "%s\t%s\t%d\t%d\t%d\t%d\t%s\t%s\t%d\t%d\t%d\n", cmp.Or(p.Address, p.Name), p.State, p.Entries, p.Asks, p.Failures, p.Struck,
			config.SizeText(p.Bytes), config.SizeText(p.NixlBytes), p.Offers, p.Taken, p.Blamed)
	})
	for _, p := range now.Peers {
		if p.Reason != "" {
			fmt.Fprintf(&b, "%s is %s: %s\n\n", cmp.Or(p.Address, p.Name), p.State, p.Reason)
		}
	}
	for _, r := range now.Roots {
		if r.Reason != "" {
			fmt.Fprintf(&b, "%s is %s: %s\n\n", r.Path, word(r.State), r.Reason)
		}
	}
	table(&b, "LEVEL\tHITS\tLOADED\tDEMOTED TO\tPROMOTED TO\tPREFETCHED\tUSED\tKEPT\tSHED", levelsOf(now), func(w io.Writer, n int) {
		at := func(name string) uint64 { return now.Counters[fmt.Sprintf("level%d_%s", n, name)] }
		kept := "-" // what is not in memory is there after the host
		if all := at("volatile"); all > 0 {
			kept = percent(at("kept"), all)
		}
		fmt.Fprintf(w, "%d\t%d\t%s\t%d\t%d\t%d\t%d\t%s\t%d\n", n, at("hits"), config.SizeText(at("loaded_bytes")), at("demotion"), at("promotion"),
			at("prefetch"), at("prefetch_used"), kept, at("demotion_shed")+at("promotion_shed")+at("through_shed")+at("prefetch_shed"))
	})
	table(&b, "POLICY\tROLE\tSTATE\tMODULE\tCALLS\tNS/RECORD\tFAULTS\tHIT RATIO\tROOT", now.Policies,
		func(w io.Writer, p *proto.PolicyStatus) {
			ratio, cost := "-", "-"
			if p.Trial != nil {
				ratio = percent(p.Trial.Hits, p.Trial.Keys) + ", live " + percent(p.Trial.LiveHits, p.Trial.Keys)
			}
			if p.Records > 0 {
				cost = fmt.Sprintf("%.0f", float64(p.Time.AsDuration())/float64(p.Records))
			}
			fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%d\t%s\t%d\t%s\t%s\n", p.Name, word(p.Role), word(p.State), p.Module,
				p.Calls, cost, p.Faults, ratio, p.Root)
		})
	table(&b, "ANSWER\tCOUNT\tP50\tP90\tP99\tMEAN", now.Latencies, func(w io.Writer, l *proto.LatencyStatus) {
		mean := time.Duration(0)
		if l.Count > 0 {
			mean = l.Sum.AsDuration() / time.Duration(l.Count)
		}
		fmt.Fprintf(w, "%s\t%d\t%s\t%s\t%s\t%s\n", proto.Word(l.Answer), l.Count, quantile(l, 0.5), quantile(l, 0.9), quantile(l, 0.99),
			mean.Round(max(1, mean/100)))
	})
	routes := slices.DeleteFunc(slices.Clone(now.Routes), func(r *proto.RouteStatus) bool { return r.Files+r.Errors == 0 })
	table(&b, "MEMORY\tROOT\tROUTE\tDIRECTION\tNOW\tPIECES\tBYTES\tIN FLIGHT\tERRORS", routes, func(w io.Writer, r *proto.RouteStatus) {
		bytes := func(s *proto.StatusResponse) (n uint64) {
			for _, o := range s.Routes {
				if o.Gpu == r.Gpu && o.Root == r.Root && o.Route == r.Route && o.Direction == r.Direction {
					n += o.Bytes
				}
			}
			return n
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%d\t%s\t%d\t%d\n", r.Gpu, r.Root, word(r.Route), word(r.Direction), speedText(perSecond(bytes)),
			r.Files, config.SizeText(r.Bytes), r.InFlight, r.Errors)
	})
	table(&b, "MODEL\tTENANT\tKEYS\tHIT RATIO\tLOADED\tSTORED", busiest(now.Usage), func(w io.Writer, u *proto.UsageStatus) {
		fmt.Fprintf(w, "%s\t%d\t%d\t%s\t%s\t%s\n", cmp.Or(u.Model, "-"), u.Tenant, u.Keys, percent(u.Hits, u.Keys), config.SizeText(u.LoadedBytes),
			config.SizeText(u.StoredBytes))
	})
	table(&b, "SHARED\tHOST'S OWN\tHELD\tREFUSED\tMOST IS HELD BY", now.Budgets, func(w io.Writer, u *proto.BudgetStatus) {
		var most []string
		for _, h := range u.Most {
			most = append(most, h.Name+" "+percent(h.Held, u.Limit))
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%d\t%s\n", u.Of, percent(u.Own, u.Limit), percent(u.Held, u.Limit), u.Refused, strings.Join(most, ", "))
	})
	table(&b, "SESSION\tENGINE\tROLE\tRANK\tMODEL\tLEASES\tJOBS\tFOR", now.SessionList, func(w io.Writer, x *proto.SessionStatus) {
		age := time.Since(x.Since.AsTime()).Round(time.Second)
		fmt.Fprintf(w, "%d\t%s\t%s\t%d\t%s\t%d\t%d\t%s\n", x.Number, x.Engine, cmp.Or(x.Role, "-"), x.Rank, cmp.Or(x.Model, "-"), x.Leases,
			x.Jobs, age)
	})
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

// table writes rows under a heading, and nothing when there are none.
func table[R any](b *strings.Builder, heading string, rows []R, row func(io.Writer, R)) {
	if len(rows) == 0 {
		return
	}
	t := tabwriter.NewWriter(b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, heading)
	for _, r := range rows[:min(len(rows), mostListed)] {
		row(t, r)
	}
	t.Flush()
	if more := len(rows) - mostListed; more > 0 {
		fmt.Fprintf(b, "... and %d more: kvhost status --json\n", more)
	}
	b.WriteByte('\n')
}

// mostLevels is more than a host can have.
const mostLevels = 8

// levelsOf are those that a host has, if it has several.
func levelsOf(s *proto.StatusResponse) (list []int) {
	for n := range mostLevels {
		if _, has := s.Counters[fmt.Sprintf("level%d_hits", n)]; has {
			list = append(list, n)
		}
	}
	return list
}

// busiest sorts by keys, most first.
func busiest(list []*proto.UsageStatus) []*proto.UsageStatus {
	return slices.SortedStableFunc(slices.Values(list), func(a, b *proto.UsageStatus) int { return cmp.Compare(b.Keys, a.Keys) })
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

func quantile(l *proto.LatencyStatus, q float64) string {
	bounds := make([]float64, len(l.Bounds))
	for i, b := range l.Bounds {
		bounds[i] = b.AsDuration().Seconds()
	}
	s := bucketBound(q, bounds, l.Buckets)
	if s == 0 {
		return "-"
	}
	return "<" + time.Duration(1e9*s).String()
}

// bar draws ten characters of which a part is full.
func bar(part, whole uint64) string {
	n := 0
	if whole > 0 {
		n = int(min(10, (10*part+whole/2)/whole))
	}
	return "[" + strings.Repeat("#", n) + strings.Repeat(".", 10-n) + "]"
}

func percent(part, whole uint64) string {
	if whole == 0 {
		return "-"
	}
	return fmt.Sprintf("%.1f%%", 100*float64(part)/float64(whole))
}

func speedText(n float64) string { return config.SizeText(int64(n)) + "/s" }

// word turns ROOT_STATE_READ_ONLY into "read only".
func word(e protoreflect.Enum) string { return strings.ReplaceAll(proto.Word(e), "_", " ") }

// bucketBound returns the bucket bound below which a part q of the answers lies, and 0 if there were none. Answers above the
// last bound count as the last bound.
func bucketBound(q float64, bounds []float64, buckets []uint64) float64 {
	var count, below uint64
	for _, n := range buckets {
		count += n
	}
	for i, n := range buckets {
		if below += n; count > 0 && float64(below) >= q*float64(count) {
			return bounds[min(i, len(bounds)-1)]
		}
	}
	return 0
}
