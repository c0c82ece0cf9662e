package main

import (
	"context"
	"encoding/xml"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
)

const pythonTests, pythonAgain = "the Python client's tests", "make test ONLY=python"

// buildPython builds the host that the Python client's tests start.
func buildPython(ctx context.Context, s *suite, r *result) bool {
	for _, tool := range []*testenv.Tool{testenv.Make, testenv.PythonPackages} {
		if tool.Obtain() {
			continue
		}
		if first := tool.First(); testenv.Required() {
			r.fail(failure{what: pythonTests, why: fmt.Sprintf("missing: %s: %s (%s=1)", first.Name, first.Fix(), testenv.Require), again: pythonAgain})
		} else {
			r.skip(fmt.Sprintf("missing: %s: %s", first.Name, first.Fix()), pythonTests, true)
		}
		return false
	}
	if err := s.command(ctx, r, nil, "make", "--no-print-directory", "build"); err != nil {
		r.fail(failure{what: pythonTests, why: err.Error(), again: pythonAgain})
		return false
	}
	return true
}

// python runs the Python client's tests against a host, in a virtual environment.
func python(ctx context.Context, s *suite, r *result) {
	if err := s.python(ctx, r); err != nil && len(r.failures) == 0 {
		r.fail(failure{what: pythonTests, why: err.Error(), again: pythonAgain})
	}
}

func (s *suite) python(ctx context.Context, r *result) error {
	dir, err := os.MkdirTemp(testenv.ShortTemp(), "kvhost-suite-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	socket, stop, err := startHost(dir)
	if err != nil {
		return err
	}
	top, err := os.Getwd()
	if err != nil {
		return errors.Join(err, stop(r))
	}
	report := filepath.Join(dir, "report.xml")
	env := []string{
		"KVHOST_SOCKET=" + socket, "KVHOST_BIN=" + filepath.Join(top, "bin", "kvhost"), fmt.Sprintf("KVHOST_TEST_TIMEOUT=%.0f", s.timeout.Seconds()),
	}
	bounded, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	stacks := fmt.Sprintf("faulthandler_timeout=%.0f", s.timeout.Seconds()*0.97)
	err = s.command(bounded, r, env, ".venv/bin/python", "-m", "pytest", "-q", "-o", stacks, "--junitxml="+report, "host/client/python")
	if bounded.Err() != nil && ctx.Err() == nil {
		err = fmt.Errorf("not at its end after %s: %w", s.timeout, err)
	}
	return errors.Join(err, r.takeReport(report), stop(r))
}

func (s *suite) command(ctx context.Context, r *result, env []string, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Cancel, cmd.WaitDelay = func() error { return cmd.Process.Signal(os.Interrupt) }, 10*time.Second // then it is killed
	cmd.Env = append(os.Environ(), env...)
	cmd.Stdout, cmd.Stderr = s.out, s.out
	err := cmd.Run()
	r.used(cmd.ProcessState)
	if err != nil {
		return fmt.Errorf("%s %s: %w", name, strings.Join(args, " "), err)
	}
	return nil
}

// startHost starts a host in a directory and returns when it says that it is ready, as it does to a service manager.
func startHost(dir string) (socket string, stop func(*result) error, err error) {
	socket = filepath.Join(dir, "s")
	notify := &net.UnixAddr{Name: filepath.Join(dir, "notify"), Net: "unixgram"}
	manager, err := net.ListenUnixgram("unixgram", notify)
	if err != nil {
		return "", nil, err
	}
	defer manager.Close()
	cmd := exec.Command("bin/kvhost", "--root", filepath.Join(dir, "kv")+"=1GiB", "--socket", socket, "--http-listen", "", "--log-level", "warn")
	cmd.Env = append(os.Environ(), "NOTIFY_SOCKET="+notify.Name, testenv.Require+"=")
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		return "", nil, err
	}
	ended := make(chan error, 1)
	go func() {
		ended <- cmd.Wait()
		manager.Close()
	}()
	if _, err := manager.Read(make([]byte, 64)); err != nil {
		return "", nil, fmt.Errorf("the host for the Python client's tests ended before it was ready: %w", <-ended)
	}
	return socket, func(r *result) error {
		cmd.Process.Signal(syscall.SIGTERM)
		err := <-ended
		r.used(cmd.ProcessState)
		if err != nil {
			return fmt.Errorf("the host of the Python client's tests: %w", err)
		}
		return nil
	}, nil
}

// takeReport reads the results that pytest wrote.
func (r *result) takeReport(path string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("pytest left no report: %w", err)
	}
	type said struct {
		Message string `xml:"message,attr"`
		Text    string `xml:",chardata"`
	}
	var report struct {
		Cases []struct {
			Class   string `xml:"classname,attr"`
			Name    string `xml:"name,attr"`
			Failure *said  `xml:"failure"`
			Error   *said  `xml:"error"`
			Skipped *said  `xml:"skipped"`
		} `xml:"testsuite>testcase"`
	}
	if err := xml.Unmarshal(text, &report); err != nil {
		return fmt.Errorf("pytest's report: %w", err)
	}
	for _, c := range report.Cases {
		name := c.Class + " " + c.Name
		switch {
		case c.Failure != nil || c.Error != nil:
			bad := c.Failure
			if bad == nil {
				bad = c.Error
			}
			test, _, _ := strings.Cut(c.Name, "[")
			r.fail(failure{what: name, why: bad.Message, again: fmt.Sprintf("make test-python PYTEST_ARGS='-k %s'", test)})
		case c.Skipped != nil:
			why := c.Skipped.Message
			if _, text, ok := strings.Cut(c.Skipped.Text, "Skipped: "); ok && why == "collection skipped" { // of a whole file
				why = strings.TrimRight(text, "')\"\n")
			}
			r.skip(why, name, true)
		default:
			r.passed[name] = true
		}
	}
	if len(report.Cases) == 0 {
		return errors.New("pytest ran no test")
	}
	return nil
}
