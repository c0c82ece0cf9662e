package observe

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/proto"
)

// Table is a part of a host's status in the form for people. kvhost status prints it, and the page draws it.
type Table struct {
	Name    string   `json:"name"`
	Columns []Column `json:"columns"`
	Rows    []Row    `json:"rows"`
}

// Column is a column of a table. Number is set for columns of numbers, and Part if these are percentages.
type Column struct {
	Title  string `json:"title"`
	Number bool   `json:"number"`
	Part   bool   `json:"part"`
}

// Row is a row of a table.
type Row struct {
	Cells []string `json:"cells"`
	Tones []string `json:"tones"` // tone of each cell: good, bad or empty
	Why   string   `json:"why"`   // reason for the state of the row
}

// column computes the cells of a column from the things that are the rows of a table.
type column[R any] struct {
	Column
	cell func(R) string
	tone func(R) string // nil means no tone
}

func text[R any](title string, cell func(R) string) column[R] {
	return column[R]{Column{Title: title}, cell, nil}
}

func count[N uint32 | uint64, R any](title string, n func(R) N) column[R] {
	return column[R]{Column{Title: title, Number: true}, func(r R) string { return fmt.Sprint(n(r)) }, nil}
}

func size[R any](title string, n func(R) uint64) column[R] {
	return column[R]{Column{Title: title, Number: true}, func(r R) string { return config.SizeText(n(r)) }, nil}
}

func part[R any](title string, n, all func(R) uint64) column[R] {
	return column[R]{Column{Title: title, Number: true}, func(r R) string { return Percent(n(r), all(r)) }, nil}
}

// faults is a column of counts, in which every count but 0 is bad.
func faults[R any](title string, n func(R) uint64) column[R] {
	c := count(title, n)
	c.tone = func(r R) string { return toneOf(n(r) == 0, "") }
	return c
}

func toneOf(good bool, then string) string {
	if good {
		return then
	}
	return "bad"
}

func tableOf[R any](name string, rows []R, why func(R) string, columns ...column[R]) Table {
	t := Table{Name: name, Rows: []Row{}}
	for _, c := range columns {
		t.Columns = append(t.Columns, c.Column)
	}
	for _, r := range rows {
		row := Row{}
		for _, c := range columns {
			tone := ""
			if c.tone != nil {
				tone = c.tone(r)
			}
			row.Cells, row.Tones = append(row.Cells, c.cell(r)), append(row.Tones, tone)
		}
		if why != nil {
			row.Why = why(r)
		}
		t.Rows = append(t.Rows, row)
	}
	return t
}

type (
	rootRow    = *proto.RootStatus
	peerRow    = *proto.PeerStatus
	policyRow  = *proto.PolicyStatus
	latencyRow = *proto.LatencyStatus
	routeRow   = *proto.RouteStatus
	usageRow   = *proto.UsageStatus
	budgetRow  = *proto.BudgetStatus
	sessionRow = *proto.SessionStatus
)

// Tables returns the tables of a status. before is an earlier status of the same host, for rates.
func Tables(before, now *proto.StatusResponse) []Table {
	level := func(name string) func(int) uint64 {
		return func(n int) uint64 { return now.Counters[fmt.Sprintf("level%d_%s", n, name)] }
	}
	loaded := func(s *proto.StatusResponse, r routeRow) (n uint64) {
		for _, o := range s.Routes {
			if o.Gpu == r.Gpu && o.Root == r.Root && o.Route == r.Route && o.Direction == r.Direction {
				n += o.Bytes
			}
		}
		return n
	}
	fill := part("fill", rootRow.GetUsed, rootRow.GetCapacity)
	fill.Number, fill.Part = false, true
	return []Table{
		tableOf("roots", now.Roots, rootRow.GetReason,
			text("root", func(r rootRow) string { return r.Path + map[bool]string{true: " (shared)"}[r.Shared] }),
			column[rootRow]{Column{Title: "state"}, func(r rootRow) string { return Word(r.State) + map[bool]string{true: ", scanning"}[r.Scanning] },
				func(r rootRow) string { return toneOf(r.State == proto.RootState_ROOT_STATE_IN_SERVICE, "good") }},
			fill, size("used", rootRow.GetUsed), size("capacity", rootRow.GetCapacity), count("entries", rootRow.GetEntries),
			size("quarantine", rootRow.GetQuarantine), count("evictions", rootRow.GetEvictions), count("sheds", rootRow.GetSheds),
			faults("damaged", rootRow.GetDamaged), count("outages", rootRow.GetOutages)),
		tableOf("peers", now.Peers, peerRow.GetReason,
			text("peer", func(p peerRow) string { return cmp.Or(p.Address, p.Name) }),
			column[peerRow]{Column{Title: "state"}, peerRow.GetState, func(p peerRow) string { return toneOf(p.State != "alone", "") }},
			count("entries", peerRow.GetEntries), count("asks", peerRow.GetAsks), count("failures", peerRow.GetFailures),
			count("struck out", peerRow.GetStruck), size("read", peerRow.GetBytes), size("by NIXL", peerRow.GetNixlBytes),
			count("offered", peerRow.GetOffers), count("taken", peerRow.GetTaken), faults("blamed", peerRow.GetBlamed)),
		tableOf("levels", levelsOf(now), nil,
			text("level", func(n int) string { return fmt.Sprint(n) }), count("hits", level("hits")), size("loaded", level("loaded_bytes")),
			count("demoted to", level("demotion")), count("promoted to", level("promotion")), count("prefetched", level("prefetch")),
			count("used", level("prefetch_used")),
			part("kept", level("kept"), level("volatile")), // part of the entries that outlives the host
			count("shed", func(n int) uint64 {
				return level("demotion_shed")(n) + level("promotion_shed")(n) + level("through_shed")(n) + level("prefetch_shed")(n)
			})),
		tableOf("policies", now.Policies, policyRow.GetReason,
			text("policy", policyRow.GetName), text("role", func(p policyRow) string { return Word(p.Role) }),
			column[policyRow]{Column{Title: "state"}, func(p policyRow) string { return Word(p.State) },
				func(p policyRow) string {
					return toneOf(p.State == proto.PolicyState_POLICY_STATE_ACTING || p.State == proto.PolicyState_POLICY_STATE_SHADOW, "good")
				}},
			text("module", policyRow.GetModule), text("version", policyRow.GetVersion), text("sha-256", func(p policyRow) string { return Short(p.Digest) }),
			count("calls", policyRow.GetCalls), text("ns/record", func(p policyRow) string { return perRecord(p, uint64(p.Time.AsDuration())) }),
			text("fuel/record", func(p policyRow) string { return perRecord(p, p.Fuel) }), size("memory", policyRow.GetMemory),
			faults("faults", policyRow.GetFaults),
			text("hit ratio", func(p policyRow) string {
				switch {
				case p.Trial != nil:
					return Percent(p.Trial.Hits, p.Trial.Keys) + ", live " + Percent(p.Trial.LiveHits, p.Trial.Keys)
				case p.Role == proto.PolicyRole_POLICY_ROLE_EVICT:
					return Percent(now.Counters["lookup_hits"], now.Counters["lookup_keys"])
				}
				return ""
			}),
			text("where", func(p policyRow) string {
				if p.Trial == nil {
					return p.Root
				}
				where := "an imaginary " + config.FormatSize(int64(p.Trial.Capacity))
				if p.Trial.Dropped > 0 {
					where += fmt.Sprintf(", %d steps dropped", p.Trial.Dropped)
				}
				return where
			})),
		tableOf("answers", now.Latencies, nil,
			text("answer", func(l latencyRow) string { return proto.Word(l.Answer) }), count("count", latencyRow.GetCount),
			text("p50", func(l latencyRow) string { return quantile(l, 0.5) }), text("p90", func(l latencyRow) string { return quantile(l, 0.9) }),
			text("p99", func(l latencyRow) string { return quantile(l, 0.99) }),
			text("mean", func(l latencyRow) string {
				mean := l.Sum.AsDuration() / time.Duration(max(1, l.Count))
				return mean.Round(max(1, mean/100)).String()
			})),
		tableOf("routes", slices.DeleteFunc(slices.Clone(now.Routes), func(r routeRow) bool { return r.Files+r.Errors == 0 }), nil,
			text("memory", routeRow.GetGpu), text("root", routeRow.GetRoot), text("route", func(r routeRow) string { return Word(r.Route) }),
			text("direction", func(r routeRow) string { return Word(r.Direction) }),
			text("now", func(r routeRow) string {
				return Speed(PerSecond(before, now, func(s *proto.StatusResponse) uint64 { return loaded(s, r) }))
			}),
			count("pieces", routeRow.GetFiles), size("bytes", routeRow.GetBytes), count("in flight", routeRow.GetInFlight),
			faults("errors", routeRow.GetErrors)),
		tableOf("usage", slices.SortedStableFunc(slices.Values(now.Usage), func(a, b usageRow) int { return cmp.Compare(b.Keys, a.Keys) }), nil,
			text("model", func(u usageRow) string { return cmp.Or(u.Model, "-") }), count("tenant", usageRow.GetTenant), count("keys", usageRow.GetKeys),
			part("hit ratio", usageRow.GetHits, usageRow.GetKeys), size("loaded", usageRow.GetLoadedBytes), size("stored", usageRow.GetStoredBytes)),
		tableOf("budgets", now.Budgets, nil,
			text("shared", budgetRow.GetOf), part("host's own", budgetRow.GetOwn, budgetRow.GetLimit), part("held", budgetRow.GetHeld, budgetRow.GetLimit),
			count("refused", budgetRow.GetRefused),
			text("most is held by", func(u budgetRow) string {
				var most []string
				for _, h := range u.Most {
					most = append(most, h.Name+" "+Percent(h.Held, u.Limit))
				}
				return strings.Join(most, ", ")
			})),
		tableOf("sessions", now.SessionList, nil,
			count("session", sessionRow.GetNumber), text("engine", sessionRow.GetEngine), text("role", func(x sessionRow) string { return cmp.Or(x.Role, "-") }),
			count("rank", sessionRow.GetRank), count("of", sessionRow.GetTensorParallel), count("units", sessionRow.GetUnits), text("model", func(x sessionRow) string { return cmp.Or(x.Model, "-") }),
			count("leases", sessionRow.GetLeases), count("jobs", sessionRow.GetJobs),
			text("for", func(x sessionRow) string { return time.Since(x.Since.AsTime()).Round(time.Second).String() })),
	}
}

// mostLevels is the largest number of levels of a host.
const mostLevels = 8

// levelsOf returns the levels of a host, or none if it has a single level.
func levelsOf(s *proto.StatusResponse) (list []int) {
	for n := range mostLevels {
		if _, has := s.Counters[fmt.Sprintf("level%d_hits", n)]; has {
			list = append(list, n)
		}
	}
	return list
}

// PerSecond returns the growth rate of a figure since an earlier status. It is 0 if the earlier status is of another process.
func PerSecond(before, now *proto.StatusResponse, read func(*proto.StatusResponse) uint64) float64 {
	since := (now.Uptime.AsDuration() - before.Uptime.AsDuration()).Seconds()
	if since <= 0 || read(now) < read(before) {
		return 0
	}
	return float64(read(now)-read(before)) / since
}

// Speed formats bytes per second for people.
func Speed(n float64) string { return config.SizeText(int64(n)) + "/s" }

func Percent(part, whole uint64) string {
	if whole == 0 {
		return "-"
	}
	return fmt.Sprintf("%.1f%%", 100*float64(part)/float64(whole))
}

// Word turns ROOT_STATE_READ_ONLY into "read only".
func Word(e protoreflect.Enum) string { return strings.ReplaceAll(proto.Word(e), "_", " ") }

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

func perRecord(p policyRow, n uint64) string {
	if n == 0 || p.Records == 0 {
		return "-"
	}
	return fmt.Sprint(n / p.Records)
}

// Short returns the first digits of a digest, which are enough for people to distinguish modules.
func Short(digest string) string { return cmp.Or(digest[:min(len(digest), 12)], "built in") }
