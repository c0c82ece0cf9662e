package command

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/replay"
)

var (
	soakTime  = flag.Duration("soak.time", 6*time.Second, "how long TestSoak runs; from 10m on it judges times and memory too")
	soakWidth = flag.Int("soak.attackers", 1, "how many clients attack at the same time")
	soakPhase = flag.Duration("soak.phase", 1500*time.Millisecond, "how long TestSoak works with one host before it turns to the other")
)

// What a host under attack may cost an honest client, compared with a host without attackers.
const (
	soakJudges   = 10 * time.Minute // shorter soaks only judge bytes
	soakSlower   = 2.0              // 99th percentile of lookups, loads and stores
	soakLeast    = 0.9              // share of hits
	soakGrowth   = 0.10             // of memory, from the second quarter to the last
	soakGrowthBy = 16 << 20         // bytes that are nothing
)

// TestSoak runs two hosts with the same configuration, in turns, so that what else the machine does meets both. Honest sessions
// come and go, whose times are measured and whose every byte is compared. One host is attacked in its turns by clients of another
// process. TestHostilePolicies has hostile modules beside a control, and TestLivePolicies swaps.
func TestSoak(t *testing.T) {
	t.Parallel() // it waits more than it works
	tally := testenv.NewTally(t, "soak")
	sides := []*soakSide{newSoakSide(t, "control", false), newSoakSide(t, "attacked", true)}
	start := time.Now()
	for n := 0; n < 2 || time.Since(start) < *soakTime; n++ {
		for i := range sides {
			s := sides[(i+n)%2]
			before := s.keys
			s.phase(n, *soakPhase)
			tally.Add(s.keys-before, 0, 0)
			if t.Failed() {
				return
			}
		}
		if n%10 == 9 || time.Since(start) >= *soakTime {
			t.Logf("after %v:\n%s", time.Since(start).Round(time.Second), soakTable(sides))
		}
	}
	for _, s := range sides {
		s.end()
	}
	judgeSoak(t, sides, *soakTime >= soakJudges)
}

// soakSide is one of the two hosts, with what works on it.
type soakSide struct {
	*testing.T
	honestSessions
	name     string
	attacked bool
	dir      string
	address  string // of its metrics
	pid      int
	logged   func() string
	stop     func(os.Signal) int
	samples  []soakSample
	start    time.Time

	attacks int
}

// soakSample is what a host takes after a phase, without sessions.
type soakSample struct {
	at                          time.Duration
	resident, goroutines, files int64
}

const soakConfig = `
socket = "s"
[http]
listen = "%s"
[[tenant]]
id = "%d"
quota = "15%%"
[[root]]
path = "one"
capacity = "48MiB"
[[root]]
path = "another"
capacity = "48MiB"
`

func newSoakSide(t *testing.T, name string, attacked bool) *soakSide {
	t.Helper()
	s := &soakSide{T: t, name: name, attacked: attacked, dir: testenv.Dir(t), start: time.Now()}
	write(t, s.dir, "kvhost.toml", fmt.Sprintf(soakConfig, anyPort, hostileTenant))
	cmd := exec.Command(binary, "--config", "kvhost.toml", "--policy-cache", filepath.Join(s.dir, "cache")) // without a time limit
	cmd.Dir = s.dir
	_, s.logged, s.stop = startCommand(t, cmd)
	s.pid, s.address, s.socket = cmd.Process.Pid, httpAddress(t, s.logged), filepath.Join(s.dir, "s")
	return s
}

// phase works with the host for a time.
func (s *soakSide) phase(n int, d time.Duration) {
	ctx, cancel := context.WithTimeout(s.Context(), d)
	defer cancel()
	ended := func() {}
	if s.attacked {
		attackers := startAttackers(s.T, filepath.Join(s.dir, "s"), uint64(n))
		ended = func() { s.ended(attackers) }
	}
	s.honest(ctx)
	ended()
	if strings.Contains(s.logged(), "goroutine ") {
		s.Errorf("%s: the host panicked:\n%s", s.name, s.logged())
	}
	s.sample()
}

// ended ends the attackers, who must not have ended before, and counts what they did.
func (s *soakSide) ended(attackers *exec.Cmd) {
	attackers.Process.Kill()
	_ = attackers.Wait()
	said := attackers.Stdout.(*strings.Builder).String()
	if status := attackers.ProcessState.Sys().(syscall.WaitStatus); !status.Signaled() || status.Signal() != syscall.SIGKILL {
		s.Errorf("the attackers ended: %v\n%s", attackers.ProcessState, said)
	}
	for line := range strings.Lines(said) {
		if strings.HasPrefix(line, "attack ") {
			s.attacks++
		}
		if strings.Contains(line, "not a name") || strings.Contains(line, "client: host: limits") {
			s.Errorf("an attack that is none: %s", line)
		}
	}
}

// honest is one session after the other. It is not ended by the phase: a session is one.
func (s *soakSide) honest(ctx context.Context) {
	for ctx.Err() == nil {
		if err := s.session(s.Context()); err != nil {
			s.Errorf("%s: session %d: %v\n%s", s.name, s.sessions, err, s.logged())
			return
		}
	}
}

// sample waits until the host has no session, and looks at what it takes.
func (s *soakSide) sample() {
	sessions := func() int64 { return gauge(s.T, s.address, "kvhost_sessions") }
	testenv.Until(s, s.name+" without sessions", func() bool { return sessions() == 0 }, func() any { return sessions() })
	files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", s.pid))
	if err != nil {
		s.Error(err)
		return
	}
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", s.pid))
	if err != nil {
		s.Error(err)
		return
	}
	x := soakSample{at: time.Since(s.start), files: int64(len(files)), goroutines: gauge(s.T, s.address, "go_goroutines")}
	for line := range strings.Lines(string(text)) {
		var kib int64
		if _, err := fmt.Sscanf(line, "VmRSS: %d kB", &kib); err == nil {
			x.resident = kib << 10
		}
	}
	s.samples = append(s.samples, x)
}

func (s *soakSide) end() {
	if code := s.stop(syscall.SIGTERM); code != exitOK {
		s.Errorf("%s: exit code %d\n%s", s.name, code, s.logged())
	}
}

// quarter is the middle of what samples of one quarter say, from 0.
func (s *soakSide) quarter(q int, of func(soakSample) int64) int64 {
	n := len(s.samples)
	var list []int64
	for _, x := range s.samples[q*n/4 : max((q+1)*n/4, q*n/4+1)] {
		list = append(list, of(x))
	}
	slices.Sort(list)
	return list[len(list)/2]
}

func residentBytes(x soakSample) int64 { return x.resident }

// soakTable is what the hosts did, side by side.
func soakTable(sides []*soakSide) string {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	row := func(name string, cell func(*soakSide) string) {
		fmt.Fprintf(w, "%s", name)
		for _, s := range sides {
			fmt.Fprintf(w, "\t%s", cell(s))
		}
		fmt.Fprintln(w)
	}
	row("", func(s *soakSide) string { return s.name })
	for i, op := range honestOps {
		row(op+" p99 (ms)", func(s *soakSide) string { return fmt.Sprintf("%.2f", s.p99(i)) })
	}
	row("honest sessions", func(s *soakSide) string { return fmt.Sprint(s.sessions) })
	row("hits of keys", func(s *soakSide) string { return fmt.Sprintf("%.2f %% of %d", 100*s.share(), s.keys) })
	row("bytes compared, wrong", func(s *soakSide) string { return fmt.Sprintf("%d  %d", s.compared, s.wrong) })
	row("chunks stored, not stored, not loaded", func(s *soakSide) string { return fmt.Sprintf("%d  %d  %d", s.stored, s.refused, s.lost) })
	row("found no room, unanswered, faults of evict policies", func(s *soakSide) string {
		var list []string
		for _, name := range []string{"kvhost_root_sheds_total", "kvhost_root_unanswered_total", "kvhost_root_evict_faults_total"} {
			list = append(list, fmt.Sprint(gauge(s.T, s.address, name)))
		}
		return strings.Join(list, "  ")
	})
	row("attacks by clients", func(s *soakSide) string { return fmt.Sprint(s.attacks) })
	row("resident MiB by quarter", func(s *soakSide) string {
		var q []string
		for i := range 4 {
			q = append(q, fmt.Sprint(s.quarter(i, residentBytes)>>20))
		}
		return strings.Join(q, " ")
	})
	row("resident MiB per hour", func(s *soakSide) string { return fmt.Sprintf("%+.1f", s.slope()/(1<<20)) })
	row("goroutines, files, first to last", func(s *soakSide) string {
		a, z := s.samples[0], s.samples[len(s.samples)-1]
		return fmt.Sprintf("%d-%d  %d-%d", a.goroutines, z.goroutines, a.files, z.files)
	})
	w.Flush()
	return b.String()
}

// slope is by how many bytes an hour the resident memory grows, by least squares over all but the first quarter.
func (s *soakSide) slope() float64 {
	list := s.samples[len(s.samples)/4:]
	var x, y, xx, xy float64
	for _, v := range list {
		at := v.at.Hours()
		x, y, xx, xy = x+at, y+float64(v.resident), xx+at*at, xy+at*float64(v.resident)
	}
	n := float64(len(list))
	if d := n*xx - x*x; d > 0 {
		return (n*xy - x*y) / d
	}
	return 0
}

// judgeSoak compares the hosts. Times and memory mean something only after a while.
func judgeSoak(t *testing.T, sides []*soakSide, all bool) {
	t.Helper()
	control, attacked := sides[0], sides[1]
	for _, s := range sides {
		if s.wrong > 0 || s.compared == 0 || s.hits == 0 || s.stored == 0 {
			t.Errorf("%s: %d wrong bytes of %d, %d hits, %d stored, %d sessions", s.name, s.wrong, s.compared, s.hits,
				s.stored, s.sessions)
		}
	}
	if attacked.attacks == 0 {
		t.Error("the attacked host met no attack")
	}
	var line strings.Builder
	for i, op := range honestOps {
		a, c := attacked.p99(i), control.p99(i)
		ratio := a / max(0.001, c)
		fmt.Fprintf(&line, "%s_p99_ratio=%.2f ", op, ratio)
		if all && ratio > soakSlower {
			t.Errorf("%s: 99th percentile %.2f ms, %.2f ms without attackers", op, a, c)
		}
	}
	hits := attacked.share() / control.share()
	from, to := attacked.quarter(1, residentBytes), attacked.quarter(3, residentBytes)
	t.Logf("%shits_ratio=%.3f wrong_bytes=%d resident_from=%d resident_to=%d resident_per_hour=%.0f", line.String(), hits,
		control.wrong+attacked.wrong, from, to, attacked.slope())
	if !all {
		return
	}
	if hits < soakLeast {
		t.Errorf("%.3f of the control's hits", hits)
	}
	if float64(to-from) > soakGrowth*float64(from)+soakGrowthBy {
		t.Errorf("memory grew from %d to %d MiB", from>>20, to>>20)
	}
	for what, of := range map[string]func(soakSample) int64{
		"goroutines":  func(x soakSample) int64 { return x.goroutines },
		"descriptors": func(x soakSample) int64 { return x.files },
	} {
		if from, to := attacked.quarter(1, of), attacked.quarter(3, of); to > from+from/4+8 {
			t.Errorf("%s grew from %d to %d", what, from, to)
		}
	}
}

// honestSessions are sessions that come to a host one after the other and replay the first requests of a trace. Every byte that
// they load is compared. Chunks have a size of their own in each of 32 sessions, so that each finds some to store.
type honestSessions struct {
	socket string

	sessions                          int
	keys, hits, stored, lost, refused int64
	compared, wrong                   int64
	times                             [3][]float64 // 99th percentiles in ms of lookups, loads and stores, by session
}

// honestOps are what is measured, in the order of honestSessions.times.
var honestOps = []string{"lookup", "load", "store"}

// session is one session. What the host refuses or fails to do is counted; an error ends the session early.
func (h *honestSessions) session(ctx context.Context) error {
	size := int64(4+h.sessions%32) * 1024
	report, err := replay.Run(ctx, replay.Options{
		Trace: mixedTrace, Socket: h.socket, Limit: 12, Memory: 4 << 20,
		Shape: replay.Shape{Ranks: 2, ChunkBytes: size, PageBytes: size},
	})
	if err != nil {
		return err
	}
	h.sessions++
	h.keys, h.hits = h.keys+report.Accesses, h.hits+report.Hits
	h.compared, h.wrong = h.compared+report.BytesLoaded, h.wrong+report.MismatchedBytes
	h.stored, h.lost = h.stored+report.Stored, h.lost+report.FailedLoads
	h.refused += report.Refused + report.Shed + report.FailedStores
	for i, l := range []replay.Latency{report.Lookup, report.Load, report.Store} {
		if l.Count > 0 {
			h.times[i] = append(h.times[i], l.P99)
		}
	}
	return nil
}

// share is that of hits.
func (h *honestSessions) share() float64 { return float64(h.hits) / float64(max(1, h.keys)) }

// p99 is the median of the sessions' 99th percentiles, in ms.
func (h *honestSessions) p99(op int) float64 {
	list := slices.Sorted(slices.Values(h.times[op]))
	if len(list) == 0 {
		return 0
	}
	return list[len(list)/2]
}
