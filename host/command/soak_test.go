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
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
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
