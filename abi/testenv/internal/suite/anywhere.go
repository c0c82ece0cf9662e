package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/abi/testenv"
)

// cell is one kind of machine. The tests run in a process of its own, and enter makes its surroundings.
type cell struct {
	name, holds string
	packages    func(string) bool
	needs       *testenv.Tool // to make it
	flags       uintptr       // namespaces
	busy        int           // loops that run at the same time
	nice        int
	warm        bool                // what tests build before they begin is in the caches
	skew        time.Duration       // of the clock that the tests are compiled with
	enter       func(p *plan) error // in the process, before the tests
}

// plan is what the process of a cell runs.
type plan struct {
	Cell     string
	Checkout string
	Binaries map[string]string // of each package
	Order    []string
	Skip     string // tests that are skipped
	Timeout  time.Duration
	Go       map[string]string // go env
	Env      []string
	Scratch  string // a directory that only this cell has
}

// built is where the tests' binaries are.
const built = ".build/anywhere"

// anywhere are the cells, as groups of tests.
func (s *suite) anywhere() (list []group) {
	for _, c := range cells() {
		list = append(list, group{name: c.name, holds: c.holds, run: func(ctx context.Context, s *suite, r *result) {
			if c.needs != nil && !c.needs.Have() {
				r.skip(fmt.Sprintf("missing: %s: %s", c.needs.Name, c.needs.Fix()), "all of "+c.name, true)
				return
			}
			if err := s.cell(ctx, r, c); err != nil {
				r.fail(failure{what: c.name, why: err.Error(), again: "make test-anywhere ONLY=" + c.name})
			}
		}})
	}
	return list
}

// cell runs the tests of one cell.
func (s *suite) cell(ctx context.Context, r *result, c cell) error {
	p, err := s.plan(ctx, r, c)
	if err != nil {
		return err
	}
	defer os.RemoveAll(p.Scratch)
	if len(p.Order) == 0 {
		r.skip("PACKAGE names none of its packages", "all of "+c.name, true)
		return nil
	}
	text, err := json.Marshal(p)
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	for range c.busy {
		loop := exec.CommandContext(ctx, "sh", "-c", "while :; do :; done")
		if err := loop.Start(); err != nil {
			return err
		}
		defer loop.Wait()
		defer loop.Process.Kill()
	}
	cmd := exec.CommandContext(ctx, self, "-enter")
	if c.nice > 0 {
		cmd = exec.CommandContext(ctx, "nice", "-n", fmt.Sprint(c.nice), self, "-enter")
	}
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.Dir = p.Checkout
	cmd.Stdin = bytes.NewReader(text)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if c.flags != 0 {
		cmd.SysProcAttr = testenv.MountNamespace()
		cmd.SysProcAttr.Cloneflags |= c.flags
		cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	}
	var said bytes.Buffer
	cmd.Stderr = &said
	reading, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	f := &following{suite: s, result: r, of: len(p.Order), output: map[key]*bytes.Buffer{}, builds: map[string]*bytes.Buffer{},
		again: func(path, _ string) string { return fmt.Sprintf("make test-anywhere ONLY=%s PACKAGE=%s", c.name, path) }}
	f.read(bufio.NewReader(reading))
	err = cmd.Wait()
	r.used(cmd.ProcessState)
	if err != nil && len(r.failures) == 0 || err == nil && f.done != f.of {
		return fmt.Errorf("%d of %d packages have a result: %v\n%s", f.done, f.of, err, said.String())
	}
	return nil
}

// plan compiles the tests of a cell where that was not yet done.
func (s *suite) plan(ctx context.Context, r *result, c cell) (p *plan, err error) {
	p = &plan{Cell: c.name, Binaries: map[string]string{}, Timeout: s.timeout, Env: os.Environ()}
	if p.Checkout, err = filepath.Abs(s.dir); err != nil {
		return nil, err
	}
	slow, err := slowTests(s.dir)
	if err != nil {
		return nil, err
	}
	p.Skip = slow.pattern() // they take minutes, and look at nothing outside the process
	out, err := exec.CommandContext(ctx, "go", "env", "-json", "GOCACHE", "GOMODCACHE", "GOROOT", "GOPATH").Output()
	if err != nil {
		return nil, fmt.Errorf("go env: %w", err)
	}
	if err := json.Unmarshal(out, &p.Go); err != nil {
		return nil, fmt.Errorf("go env: %w", err)
	}
	only := strings.Fields(os.Getenv("PACKAGE"))
	has := func(path string) bool { return c.packages(path) && (len(only) == 0 || slices.Contains(only, path)) }
	if p.Order, err = s.packages(ctx, has); err != nil || len(p.Order) == 0 {
		return p, err
	}
	for _, path := range p.Order {
		if p.Binaries[path], err = s.compile(ctx, r, path, c.skew, p.Go["GOROOT"]); err != nil {
			return nil, err
		}
		if !c.warm {
			continue
		}
		// A TestMain may build, and a read-only cache takes nothing that it does not have.
		cmd := exec.CommandContext(ctx, p.Binaries[path], "-test.run=^$")
		cmd.Dir = filepath.Join(p.Checkout, path)
		text, err := cmd.CombinedOutput()
		r.used(cmd.ProcessState)
		if err != nil {
			return nil, fmt.Errorf("%s: %w\n%s", path, err, text)
		}
	}
	if p.Binaries[converter], err = s.convert(ctx); err != nil {
		return nil, err
	}
	p.Scratch, err = os.MkdirTemp("", "kvhost-anywhere-")
	return p, err
}

// compile makes a package's test binary, once for all cells.
func (s *suite) compile(ctx context.Context, r *result, path string, skew time.Duration, goroot string) (string, error) {
	name := strings.ReplaceAll(path, "/", ".") + ".test"
	args := []string{"test", "-c", "-vet=off"}
	if skew != 0 {
		overlay, err := skewed(s.dir, goroot, skew)
		if err != nil {
			return "", err
		}
		name = "skewed." + name
		args = append(args, "-overlay", overlay)
	}
	binary, err := filepath.Abs(filepath.Join(s.dir, built, name))
	if err != nil || s.compiled[binary] {
		return binary, err
	}
	if s.compiled == nil {
		s.compiled = map[string]bool{}
		fmt.Fprintln(s.out, "   go compiles the tests of each package once, for all cells")
	}
	if err := os.MkdirAll(filepath.Dir(binary), 0o755); err != nil {
		return "", err
	}
	cmd := exec.CommandContext(ctx, "go", append(args, "-o", binary, "./"+path)...)
	cmd.Dir = s.dir
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	text, err := cmd.CombinedOutput()
	r.used(cmd.ProcessState)
	if err != nil {
		return "", fmt.Errorf("go test -c ./%s: %w\n%s", path, err, text)
	}
	s.compiled[binary] = true
	return binary, nil
}

// converter is Go's tool that makes events of what a test binary prints.
const converter = "cmd/test2json"

func (s *suite) convert(ctx context.Context) (string, error) {
	binary, err := filepath.Abs(filepath.Join(s.dir, built, "test2json"))
	if err != nil || s.compiled[binary] {
		return binary, err
	}
	if out, err := exec.CommandContext(ctx, "go", "build", "-o", binary, converter).CombinedOutput(); err != nil {
		return "", fmt.Errorf("go build %s: %w\n%s", converter, err, out)
	}
	s.compiled[binary] = true
	return binary, nil
}

// skewed writes a package time with a clock that is ahead, as an overlay of Go's: no namespace shifts the clock of the day, and a program
// in Go asks the kernel.
func skewed(dir, goroot string, skew time.Duration) (overlay string, err error) {
	from := filepath.Join(goroot, "src", "time", "time.go")
	text, err := os.ReadFile(from)
	if err != nil {
		return "", err
	}
	const asked = "sec, nsec, mono := runtimeNow()\n"
	if strings.Count(string(text), "\nfunc Now() Time {\n\t"+asked) != 1 {
		return "", fmt.Errorf("%s: its Now has another shape than the one that is known here", from)
	}
	changed := strings.Replace(string(text), asked, fmt.Sprintf("%s\tsec += %d\n", asked, int64(skew.Seconds())), 1)
	to, err := filepath.Abs(filepath.Join(dir, built, "time.go.txt"))
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return "", err
	}
	list, err := json.Marshal(map[string]map[string]string{"Replace": {from: to}})
	if err != nil {
		return "", err
	}
	overlay = filepath.Join(filepath.Dir(to), "overlay.json")
	for name, text := range map[string]string{to: changed, overlay: string(list)} {
		if was, err := os.ReadFile(name); err == nil && string(was) == text {
			continue
		}
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			return "", err
		}
	}
	return overlay, nil
}

// enter makes the surroundings of a cell for this thread, and begins anew in them.
func enter() error {
	runtime.LockOSThread()
	var p plan
	if err := json.NewDecoder(os.Stdin).Decode(&p); err != nil {
		return err
	}
	at := slices.IndexFunc(cells(), func(c cell) bool { return c.name == p.Cell })
	if at < 0 {
		return fmt.Errorf("no cell is called %q", p.Cell)
	}
	if err := cells()[at].enter(&p); err != nil {
		return fmt.Errorf("%s: %w", p.Cell, err)
	}
	text, err := json.Marshal(&p)
	if err != nil {
		return err
	}
	fd, err := unix.MemfdCreate("plan", 0)
	if err != nil {
		return err
	}
	if _, err := unix.Write(fd, text); err != nil {
		return err
	}
	if _, err := unix.Seek(fd, 0, io.SeekStart); err != nil {
		return err
	}
	if err := unix.Dup2(fd, 0); err != nil {
		return err
	}
	return syscall.Exec("/proc/self/exe", []string{"suite", "-inside"}, p.Env)
}

// results are the events that end a package or a test.
var results = []string{"pass", "fail", "skip"}

// inside runs the tests of a cell, as many packages at a time as there are cores, and prints what test2json says.
func inside() error {
	var p plan
	if err := json.NewDecoder(os.Stdin).Decode(&p); err != nil {
		return err
	}
	var printing sync.Mutex
	var work sync.WaitGroup
	paths := make(chan string)
	for range runtime.NumCPU() {
		work.Go(func() {
			for path := range paths {
				cmd := exec.Command(p.Binaries[converter], "-t", "-p", module+"/"+path, p.Binaries[path], "-test.v=test2json",
					"-test.paniconexit0", "-test.timeout="+p.Timeout.String(), "-test.skip="+p.Skip)
				cmd.Dir = filepath.Join(p.Checkout, path)
				cmd.Stderr = os.Stderr
				reading, err := cmd.StdoutPipe()
				if err == nil {
					err = cmd.Start()
				}
				if err != nil {
					fmt.Fprintf(os.Stderr, "%s: %v\n", path, err)
					continue
				}
				lines, ended := bufio.NewReader(reading), false
				for {
					line, err := lines.ReadBytes('\n')
					var e event
					ended = ended || json.Unmarshal(line, &e) == nil && e.Test == "" && slices.Contains(results, e.Action)
					printing.Lock()
					os.Stdout.Write(line)
					printing.Unlock()
					if err != nil {
						break
					}
				}
				if cmd.Wait(); !ended { // a test has panicked
					printing.Lock()
					fmt.Printf("{\"Action\":\"fail\",\"Package\":%q}\n", module+"/"+path)
					printing.Unlock()
				}
			}
		})
	}
	for _, path := range p.Order {
		paths <- path
	}
	close(paths)
	work.Wait()
	return nil
}
