package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"

	"github.com/kvhost/kvhost/abi/testenv"
)

const module = "github.com/kvhost/kvhost"

// processes are packages with tests of processes, which wait more than they work. They come first: with them the first-party policies
// are compiled for all, which takes twenty times as long under the race detector.
var processes = []string{"host/command", "examples/...", "cmd/..."}

// single are packages of which no test has two goroutines at work. The race detector sees what is shared of them in the tests of those
// that use them. All that is neither here nor in processes is tested under it.
var single = []string{
	"abi/...", "plugins/...", "gds/fileio", "gds/internal/kernels", "host/kv", "host/internal/codec", "host/internal/config", "host/internal/doctor",
	"host/internal/drive", "host/internal/payload", "host/internal/plain", "host/internal/policy/meter", "host/internal/policy/plugintest",
	"host/internal/proto/...", "host/internal/regular", "host/internal/sim", "host/internal/store/catalog", "host/internal/store/health",
	"host/internal/store/index", "host/internal/store/pieceformat", "host/internal/store/shared", "host/internal/trace",
}

// longest begin first, so that no core waits for one of them in the end.
var longest = []string{"host/internal/testkit/storetest", "host/internal/store", "host/internal/policy", "host/internal/transfer"}

func groups() []group {
	return []group{
		{name: "vet", holds: "go vet looks at everything, so that go test does not", run: vet},
		{name: "processes", holds: "real processes: the command, the examples", run: func(ctx context.Context, s *suite, r *result) {
			s.goTest(ctx, r, goTest{}, in(processes))
		}},
		{name: "single", holds: "packages of which no test has two goroutines at work", run: func(ctx context.Context, s *suite, r *result) {
			s.goTest(ctx, r, goTest{}, in(single))
		}},
		{name: "slow", holds: "what says that it is slow under the race detector, with the code's own checks (invariants)", run: slow},
		{name: "python", holds: "the Python client against a real host", build: buildPython, run: python},
		{name: "race", holds: "all other packages under the race detector, with the code's own checks (invariants)", run: race},
	}
}

func vet(ctx context.Context, s *suite, r *result) {
	cmd := exec.CommandContext(ctx, "go", "vet", "-trimpath", "-tags", tags, "./...")
	cmd.Dir, cmd.Env = s.dir, append(os.Environ(), withoutC)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	r.used(cmd.ProcessState)
	if err != nil {
		r.fail(failure{what: "go vet ./...", why: out.String() + err.Error(), again: "go vet ./..."})
		return
	}
	r.passed["go vet ./..."] = true
}

func race(ctx context.Context, s *suite, r *result) {
	if !testenv.CC.Have() {
		why := fmt.Sprintf("missing: %s: %s", testenv.CC.Name, testenv.CC.Fix())
		if testenv.Required() {
			r.fail(failure{what: "the race detector", why: why, again: "make test ONLY=race"})
		}
		r.skip(why, "the race detector: its tests run without it", false)
		s.goTest(ctx, r, goTest{invariants: true, skip: s.alreadySlow()}, concurrent)
		return
	}
	s.goTest(ctx, r, goTest{race: true, invariants: true}, concurrent)
}

func slow(ctx context.Context, s *suite, r *result) {
	found, err := slowTests(s.dir)
	if err != nil {
		r.fail(failure{what: "testenv.Slow", why: err.Error(), again: "make test ONLY=slow"})
		return
	}
	s.goTest(ctx, r, goTest{invariants: true, run: found.pattern()}, func(path string) bool { return found.packages[path] })
}

// alreadySlow are the slow tests, for a race group without the race detector, where they do not skip themselves.
func (s *suite) alreadySlow() string {
	if !slices.ContainsFunc(s.results, func(r *result) bool { return r.name == "slow" }) {
		return ""
	}
	found, err := slowTests(s.dir)
	if err != nil {
		return ""
	}
	return found.pattern()
}

// in says whether a path below the module matches one of the patterns.
func in(patterns []string) func(string) bool {
	return func(path string) bool {
		return slices.ContainsFunc(patterns, func(p string) bool {
			below, all := strings.CutSuffix(p, "/...")
			return path == below || all && strings.HasPrefix(path, below+"/")
		})
	}
}

func concurrent(path string) bool { return !in(processes)(path) && !in(single)(path) }

// packages are those with tests that a group has, the longest first, as paths below the module.
func (s *suite) packages(ctx context.Context, has func(string) bool) ([]string, error) {
	if s.tested == nil {
		const format = "{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}}{{end}}"
		cmd := exec.CommandContext(ctx, "go", "list", "-tags", "invariants", "-f", format, "./...")
		cmd.Dir, cmd.Stderr = s.dir, os.Stderr
		out, err := cmd.Output()
		if err != nil {
			return nil, fmt.Errorf("go list ./...: %w", err)
		}
		for path := range strings.FieldsSeq(string(out)) {
			s.tested = append(s.tested, strings.TrimPrefix(strings.TrimPrefix(path, module), "/"))
		}
		slices.SortStableFunc(s.tested, func(a, b string) int { return rank(a) - rank(b) })
	}
	return slices.DeleteFunc(slices.Clone(s.tested), func(path string) bool { return !has(path) }), nil
}

func rank(path string) int {
	if n := slices.Index(longest, path); n >= 0 {
		return n
	}
	return len(longest)
}
