package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
)

// goTest is how go test runs for a group.
type goTest struct {
	race, invariants bool
	run, skip        string
}

// flags are those that a command for one test has, too. They include make build's: the tests compile nothing again that it has compiled, or
// another checkout's tests.
func (g goTest) flags() []string {
	list := []string{"test", "-trimpath"}
	if g.race {
		list = append(list, "-race")
	}
	if g.invariants {
		return append(list, "-tags", tags+",invariants")
	}
	return append(list, "-tags", tags)
}

// tags are those that the Makefile builds with.
const tags = "grpcnotrace"

// withoutC is how all is compiled but for the race detector.
const withoutC = "CGO_ENABLED=0"

func (g goTest) cgo() string {
	if g.race {
		return "CGO_ENABLED=1"
	}
	return withoutC
}

// again is the command that repeats a test alone, or a package.
func (g goTest) again(path, test string) string {
	parts := append([]string{g.cgo(), "go"}, g.flags()...)
	if test != "" {
		var levels []string
		for level := range strings.SplitSeq(test, "/") {
			levels = append(levels, "^"+regexp.QuoteMeta(level)+"$")
		}
		parts = append(parts, "-count=1", "-run", "'"+strings.ReplaceAll(strings.Join(levels, "/"), "'", ".")+"'")
	}
	return strings.Join(append(parts, "./"+path), " ")
}

// event is a line of go test -json.
type event struct {
	Action, Package, ImportPath, Test, Output, FailedBuild string
	Elapsed                                                float64
}

// more packages than there are cores run at once: most of them wait now and then.
const more = 2

// atOnce is how many tests of a package run at once of those that may: they say so because they wait more than they work.
const atOnce = "4"

// goTest runs the tests of a group's packages.
func (s *suite) goTest(ctx context.Context, r *result, g goTest, has func(string) bool) {
	list, err := s.packages(ctx, has)
	if err == nil && len(list) == 0 {
		err = errors.New("no package has tests")
	}
	if err != nil {
		r.fail(failure{what: "the packages of " + r.name, why: err.Error(), again: "make test ONLY=" + r.name})
		return
	}
	args := append(g.flags(), "-json", "-vet=off", fmt.Sprintf("-p=%d", runtime.NumCPU()+more), "-parallel="+atOnce, fmt.Sprintf("-timeout=%s", s.timeout))
	if g.run != "" {
		args = append(args, "-run", g.run)
	}
	if g.skip != "" {
		args = append(args, "-skip", g.skip)
	}
	for _, p := range list {
		args = append(args, "./"+p)
	}
	fmt.Fprintf(s.out, "%d packages: go compiles what has changed, which takes minutes the first time\n", len(list))
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = s.dir
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	// A program under the race detector sleeps when it ends, a second by default: each package's tests, and each process that they start.
	cmd.Env = append(os.Environ(), g.cgo())
	if os.Getenv("GORACE") == "" {
		cmd.Env = append(cmd.Env, "GORACE=atexit_sleep_ms=50")
	}
	reading, err := cmd.StdoutPipe()
	if err != nil {
		r.fail(failure{what: "go test", why: err.Error(), again: "make test ONLY=" + r.name})
		return
	}
	var said bytes.Buffer
	cmd.Stderr = &said
	if err := cmd.Start(); err != nil {
		r.fail(failure{what: "go test", why: err.Error(), again: "make test ONLY=" + r.name})
		return
	}
	f := &following{suite: s, result: r, again: g.again, of: len(list), output: map[key]*bytes.Buffer{}, builds: map[string]*bytes.Buffer{}}
	f.read(bufio.NewReader(reading))
	err = cmd.Wait()
	r.used(cmd.ProcessState)
	if err != nil && len(r.failures) == 0 {
		r.fail(failure{what: "go test", why: said.String() + err.Error(), again: "make test ONLY=" + r.name})
	}
	if err == nil && f.done != f.of {
		r.fail(failure{what: "go test", why: fmt.Sprintf("%d of %d packages have a result", f.done, f.of), again: "make test ONLY=" + r.name})
	}
}

// key names a test; empty: the package itself.
type key struct{ path, test string }

func (k key) top() bool { return k.test != "" && !strings.Contains(k.test, "/") }

func (k key) String() string { return strings.TrimSpace("./" + k.path + " " + k.test) }

// following reads what go test says.
type following struct {
	*suite
	*result
	again    func(path, test string) string // the command that repeats it
	of, done int
	output   map[key]*bytes.Buffer
	builds   map[string]*bytes.Buffer // of packages that do not compile
	running  []key
	failed   []key
	told     time.Time
}

// quiet is how long the suite says nothing while tests run.
const quiet = 30 * time.Second

func (f *following) read(from *bufio.Reader) {
	lines := make(chan []byte)
	go func() {
		defer close(lines)
		for {
			line, err := from.ReadBytes('\n')
			if len(line) > 0 {
				lines <- line
			}
			if err != nil {
				return
			}
		}
	}()
	begin := time.Now()
	tick := time.NewTicker(quiet)
	defer tick.Stop()
	f.told = begin
	for {
		select {
		case line, ok := <-lines:
			if !ok {
				return
			}
			var e event
			if json.Unmarshal(line, &e) != nil {
				fmt.Fprintf(f.out, "%s", line)
				continue
			}
			f.take(e)
		case <-tick.C:
			if time.Since(f.told) >= quiet {
				f.say("   %s: %d of %d packages after %s; %s", f.name, f.done, f.of, time.Since(begin).Round(time.Second), f.now())
			}
		}
	}
}

func (f *following) say(format string, args ...any) {
	f.told = time.Now()
	fmt.Fprintf(f.out, format+"\n", args...)
}

// now is what runs.
func (f *following) now() string {
	if len(f.running) == 0 {
		return "compiling"
	}
	var names []string
	for _, k := range f.running[:min(len(f.running), 4)] {
		names = append(names, k.String())
	}
	return "running " + strings.Join(names, ", ")
}

func (f *following) take(e event) {
	k := key{strings.TrimPrefix(strings.TrimPrefix(e.Package, module), "/"), e.Test}
	switch e.Action {
	case "build-output":
		at(f.builds, e.ImportPath).WriteString(e.Output)
	case "run", "cont":
		if k.top() {
			f.running = append(f.running, k)
		}
	case "pause": // a parallel test, which waits for those that are not
		f.running = slices.DeleteFunc(f.running, func(r key) bool { return r == k })
	case "output":
		at(f.output, k).WriteString(e.Output)
		if line := strings.TrimSpace(e.Output); strings.HasPrefix(line, testenv.Building) {
			f.say("   %s", line)
		}
	case "pass", "fail", "skip":
		f.ended(k, e)
		delete(f.output, k)
		f.running = slices.DeleteFunc(f.running, func(r key) bool { return r == k || k.test == "" && r.path == k.path })
	}
}

func at[K comparable](m map[K]*bytes.Buffer, k K) *bytes.Buffer {
	if m[k] == nil {
		m[k] = &bytes.Buffer{}
	}
	return m[k]
}

func (f *following) ended(k key, e event) {
	switch {
	case k.test == "":
		f.packageEnded(k, e)
	case e.Action == "skip":
		f.skip(reason(at(f.output, k).String()), k.String(), k.top())
	case e.Action == "pass" && k.top():
		f.passed[k.String()] = true
	case e.Action == "fail":
		// A test fails with one of its parts: then the part is the failure, and its words are above.
		if !slices.ContainsFunc(f.failed, func(of key) bool { return of.path == k.path && strings.HasPrefix(of.test, k.test+"/") }) {
			f.failure(k, at(f.output, k).String())
		}
		f.failed = append(f.failed, k)
	}
}

func (f *following) failure(k key, why string) {
	f.fail(failure{what: k.String(), why: why, again: f.again(k.path, k.test), said: true})
	f.say("%s\n--- FAILED: %s", strings.TrimRight(why, "\n"), k)
}

// packageEnded takes a package's result. One fails without a test where it does not compile, panics or ends in another test's name.
func (f *following) packageEnded(k key, e event) {
	f.done++
	how := "ok"
	if e.Action == "fail" {
		how = "FAILED"
		why := at(f.output, k).String()
		if e.FailedBuild != "" {
			why = at(f.builds, e.FailedBuild).String() + why
		}
		// Tests that panic or hang have no result of their own.
		var cut []key
		for _, r := range f.running {
			if r.path == k.path {
				cut, why = append(cut, r), at(f.output, r).String()+why
			}
		}
		of := k
		if len(cut) == 1 {
			of = cut[0]
		}
		if !slices.ContainsFunc(f.failed, func(of key) bool { return of.path == k.path }) {
			f.failure(of, why)
		}
	}
	f.slowest = append(f.slowest, timed{k.path, e.Elapsed})
	f.say("%-6s %7.1f s  %s", how, e.Elapsed, k.path)
}

// reason is what a test said when it skipped itself.
func reason(output string) string {
	text := ""
	for line := range strings.Lines(output) {
		if at := saidAt.FindString(line); at != "" {
			text = strings.TrimSpace(line[len(at):])
		}
	}
	if text == "" {
		return "no reason given"
	}
	return text
}

var saidAt = regexp.MustCompile(`^\s+\S+\.go:\d+: `)
