package main

import (
	"cmp"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
)

// result is what a group came to.
type result struct {
	name      string
	passed    map[string]bool
	skipped   map[string]bool     // a test and its parts; true: the test itself
	reasons   map[string][]string // what was skipped for each
	failures  []failure
	slowest   []timed
	wall, cpu time.Duration
}

// failure is a test that failed, or what kept tests from running.
type failure struct {
	what, why, again string
	said             bool // as it happened
}

type timed struct {
	path    string
	seconds float64
}

func newResult(name string) *result {
	return &result{name: name, passed: map[string]bool{}, skipped: map[string]bool{}, reasons: map[string][]string{}}
}

func (r *result) fail(f failure) { r.failures = append(r.failures, f) }

// skip notes what was left out: a whole test, or a part of one that ran.
func (r *result) skip(why, what string, whole bool) {
	r.reasons[why] = append(r.reasons[why], what)
	r.skipped[what] = whole
}

// used adds the processor's time of a process and of those that it has waited for.
func (r *result) used(p *os.ProcessState) {
	if p != nil {
		r.cpu += p.UserTime() + p.SystemTime()
	}
}

func (r *result) row() (passed, failed, skipped int) {
	for _, whole := range r.skipped {
		if whole {
			skipped++
		}
	}
	return len(r.passed), len(r.failures), skipped
}

// settle takes away what a group skipped as slow and the slow group ran. What it did not run, no group did.
func (s *suite) settle() {
	at := slices.IndexFunc(s.results, func(r *result) bool { return r.name == "slow" })
	if at < 0 {
		return
	}
	ran := s.results[at]
	failed := func(name string) bool {
		return slices.ContainsFunc(ran.failures, func(f failure) bool { return f.what == name || strings.HasPrefix(f.what, name+"/") })
	}
	for _, r := range s.results {
		for _, name := range r.reasons[testenv.SlowReason] {
			if _, skipped := ran.skipped[name]; !ran.passed[name] && !skipped && !failed(name) && len(ran.failures) == 0 {
				r.fail(failure{what: name, why: "it is skipped as slow, and the slow group did not run it", again: "make test ONLY='slow race'"})
			}
			delete(r.skipped, name)
		}
		delete(r.reasons, testenv.SlowReason)
	}
}

// report prints the table and says how the suite exits.
func (s *suite) report() int {
	s.settle()
	s.printSlowest()
	s.printReasons()
	var sum [3]int
	var wall, cpu time.Duration
	table := tabwriter.NewWriter(s.out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(table, "\ngroup\tpassed\tfailed\tskipped\twall s\tcpu s\t")
	for _, r := range s.results {
		passed, failed, skipped := r.row()
		fmt.Fprintf(table, "%s\t%d\t%d\t%d\t%.0f\t%.0f\t\n", r.name, passed, failed, skipped, r.wall.Seconds(), r.cpu.Seconds())
		sum[0], sum[1], sum[2] = sum[0]+passed, sum[1]+failed, sum[2]+skipped
		wall, cpu = wall+r.wall, cpu+r.cpu
	}
	fmt.Fprintf(table, "all\t%d\t%d\t%d\t%.0f\t%.0f\t\n", sum[0], sum[1], sum[2], wall.Seconds(), cpu.Seconds())
	table.Flush()
	if sum[1] > 0 {
		fmt.Fprintln(s.out, "\nFailed, and how to repeat each alone:")
		for _, r := range s.results {
			for _, f := range r.failures {
				fmt.Fprintf(s.out, "  %s: %s\n      %s\n", r.name, f.what, f.again)
			}
		}
	}
	fmt.Fprintf(s.out, "\n%d passed, %d failed, %d skipped\n", sum[0], sum[1], sum[2])
	if sum[1] > 0 {
		return 1
	}
	return 0
}

func (s *suite) printSlowest() {
	var all []timed
	for _, r := range s.results {
		all = append(all, r.slowest...)
	}
	slices.SortFunc(all, func(a, b timed) int { return cmp.Compare(b.seconds, a.seconds) })
	for i, t := range all[:min(10, len(all))] {
		if i == 0 {
			fmt.Fprintln(s.out, "\nThe slowest packages, in seconds:")
		}
		fmt.Fprintf(s.out, "%7.1f  %s\n", t.seconds, t.path)
	}
}

// printReasons says what was skipped, and how to get what it lacks.
func (s *suite) printReasons() {
	reasons := map[string][]string{}
	for _, r := range s.results {
		for why, names := range r.reasons {
			reasons[why] = append(reasons[why], names...)
		}
	}
	if len(reasons) == 0 {
		fmt.Fprintln(s.out, "\nNothing was skipped.")
		return
	}
	fmt.Fprintln(s.out, "\nSkipped, and why:")
	for _, why := range slices.Sorted(maps.Keys(reasons)) {
		names := reasons[why]
		few := strings.Join(names[:min(3, len(names))], ", ")
		if len(names) > 3 {
			few += ", ..."
		}
		fmt.Fprintf(s.out, "%5d  %s\n         %s\n", len(names), why, few)
	}
	var missing []string
	for _, tool := range testenv.Tools {
		if tool.Packages != "" && !tool.Have() {
			missing = append(missing, tool.Packages)
		}
	}
	if len(missing) > 0 {
		fmt.Fprintf(s.out, "All of it on Debian: apt-get install --no-install-recommends %s\n", strings.Join(missing, " "))
	}
}
