package command

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
)

// serviceUnit is the unit in examples/. It has only lines that systemd takes, which has no comments behind a value.
func serviceUnit(t *testing.T) (values map[string]string) {
	t.Helper()
	text, err := os.ReadFile("../../examples/deploy/systemd/kvhost.service")
	testenv.OK(t, err)
	sections, values := map[string]bool{}, map[string]string{}
	for n, line := range strings.Split(strings.TrimSpace(string(text)), "\n") {
		key, value, setting := strings.Cut(line, "=")
		switch {
		case line == "" || line[0] == '#':
		case line[0] == '[':
			sections[line] = true
		case !setting || strings.ContainsAny(key, " \t") || strings.Contains(value, " #"):
			t.Errorf("line %d: %q", n+1, line)
		default:
			values[key] = value
		}
	}
	if !sections["[Unit]"] || !sections["[Service]"] || !sections["[Install]"] {
		t.Errorf("sections %v", sections)
	}
	return values
}

// The unit restarts a host that has crashed, whatever the crash, and does not retry what a restart cannot mend.
func TestServiceUnit(t *testing.T) {
	values := serviceUnit(t)
	stays := func(code int) bool {
		return slices.Contains(strings.Fields(values["RestartPreventExitStatus"]), fmt.Sprint(code))
	}
	if values["Restart"] != "on-failure" {
		t.Errorf("Restart=%s", values["Restart"])
	}
	dir := shortDir(t)
	for _, crash := range []syscall.Signal{syscall.SIGQUIT, syscall.SIGABRT, syscall.SIGSEGV} {
		_, logged, stop := startHost(t, dir, "--http-listen", "")
		if code := stop(crash); code != 2 || stays(code) || !strings.Contains(logged(), "goroutine ") {
			t.Errorf("%v: exit code %d; the unit restarts it: %v\n%s", crash, code, !stays(code), logged())
		}
	}
	cmd := command(t, dir)
	cmd.Path, cmd.Args = "/bin/sh", []string{"sh", "-c", `ulimit -v 100000 && exec "$0"`, binary}
	if text, err := cmd.CombinedOutput(); cmd.ProcessState.ExitCode() != 2 || !strings.Contains(string(text), "memory") {
		t.Errorf("without memory: %v\n%s", err, text)
	}

	_, _, stop := startHost(t, dir, "--http-listen", "")
	defer stop(syscall.SIGTERM)
	for _, test := range []struct {
		args []string
		code int
	}{
		{[]string{"--polcy", "lru"}, exitUsage},
		{[]string{"--socket", "b.sock", "--http-listen", ""}, exitRootBusy},
		{[]string{"--root", "other", "--policy", "none.wasm", "--http-listen", ""}, exitPolicy},
	} {
		if r := finish(t, command(t, dir, test.args...)); r.code != test.code || !stays(r.code) {
			t.Errorf("%v: exit code %d, want %d; the unit restarts it: %v", test.args, r.code, test.code, !stays(r.code))
		}
	}
	blocked := filepath.Join(dir, "file")
	write(t, dir, "file", "not a directory")
	if r := finish(t, command(t, dir, "--root", blocked, "--socket", "c.sock", "--http-listen", "")); stays(r.code) {
		t.Errorf("a failure of storage: exit code %d is not retried\n%s", r.code, r.stderr)
	}
}

// Every code of the command is documented once, there are no gaps, and none is one of Go's runtime.
func TestExitCodes(t *testing.T) {
	codes := []int{exitRootBusy, exitAddress, exitPolicy, exitTrace, exitMismatch, exitProblems, exitCheck, exitGPU,
		exitFailure, exitUsage}
	manual, err := os.ReadFile("../docs/reference.md")
	testenv.OK(t, err)
	for i, code := range codes {
		if code != i+3 {
			t.Errorf("code %d stands where %d is expected", code, i+3)
		}
		if strings.Count(exitHelp, fmt.Sprintf("\n%3d  ", code)) != 1 ||
			strings.Count(string(manual), fmt.Sprintf("\n| %d | ", code)) != 1 {
			t.Errorf("code %d is not documented once in the help and once in docs/reference.md", code)
		}
	}
}
