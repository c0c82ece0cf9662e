package main

import (
	"bytes"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
)

// shared is a directory of all tests.
var shared string

func TestMain(m *testing.M) { os.Exit(testMain(m)) }

func testMain(m *testing.M) int {
	dir, err := os.MkdirTemp("", "kvhost-deploy-")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	shared = dir
	return m.Run()
}

// overlay gives go build the embedded policies, whatever the checkout has built.
var overlay = sync.OnceValues(func() (string, error) {
	path := filepath.Join(shared, "overlay.json")
	if out, err := exec.Command("go", "run", "../../plugins/internal/build", "-overlay", path).CombinedOutput(); err != nil {
		return "", fmt.Errorf("go run: %w\n%s", err, out)
	}
	return path, nil
})

var built = sync.OnceValues(func() (string, error) {
	with, err := overlay()
	if err != nil {
		return "", err
	}
	path := filepath.Join(shared, "kvhost")
	build := exec.Command("go", "build", "-overlay", with, "-trimpath", "-tags=grpcnotrace",
		"-ldflags=-s -w", "-o", path, "../../cmd/kvhost")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("go build: %w\n%s", err, out)
	}
	return path, nil
})

// binary is the built command.
func binary(t *testing.T) string {
	t.Helper()
	path, err := built()
	testenv.OK(t, err)
	return path
}

// bareDebian is an archive of the smallest Debian that can install packages.
func bareDebian(t *testing.T) string {
	t.Helper()
	testenv.Need(t, testenv.Debian, testenv.Mounts, testenv.Users)
	return filepath.Join(testenv.Root(), ".build", "base", "bare.tar")
}

// must runs a command and returns what it wrote.
func must(t *testing.T, name string, args ...string) string {
	t.Helper()
	cmd := exec.Command(name, args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("run %v: %v\n%s%s", cmd.Args, err, out, stderr.String())
	}
	return string(out)
}

// outside is an address of this machine that is not loopback, with a free port.
func outside(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", net.JoinHostPort(testenv.OutsideAddress(t), "0"))
	testenv.OK(t, err)
	defer l.Close()
	return l.Addr().String()
}

// server is a host that runs.
type server struct {
	t     *testing.T
	cmd   *exec.Cmd
	log   string
	ended chan struct{}
	pid   int // the host's own
}

var pidInLog = regexp.MustCompile(`"pid":(\d+)`)

// serve starts a command that becomes a host, or has one as a child, and waits until it is ready, or says why not.
func serve(t *testing.T, cmd *exec.Cmd) *server {
	t.Helper()
	s := &server{t: t, cmd: cmd, log: filepath.Join(t.TempDir(), "log"), ended: make(chan struct{})}
	f, err := os.Create(s.log)
	testenv.OK(t, err)
	defer f.Close()
	cmd.Stdout, cmd.Stderr = f, f
	cmd.SysProcAttr.Setpgid = true
	testenv.OK(t, cmd.Start())
	go func() { cmd.Wait(); close(s.ended) }()
	t.Cleanup(func() {
		syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		<-s.ended
		if t.Failed() {
			t.Logf("%v, its log:\n%s", cmd.Args, s.logged())
		}
	})
	s.await(`"http":`)
	s.pid, err = strconv.Atoi(pidInLog.FindStringSubmatch(s.logged())[1])
	testenv.OK(t, err)
	return s
}

func (s *server) logged() string {
	text, err := os.ReadFile(s.log)
	testenv.OK(s.t, err)
	return string(text)
}

func (s *server) await(text string) {
	s.t.Helper()
	testenv.Until(s.t, text+" in the log", func() bool {
		select {
		case <-s.ended:
			s.t.Fatalf("the host ended:\n%s", s.logged())
		default:
		}
		return strings.Contains(s.logged(), text)
	}, func() any { return s.logged() })
}

// unprivileged fails when the host is another user's, or has capabilities.
func (s *server) unprivileged(uid int) {
	s.t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", s.pid))
	if err != nil || !strings.Contains(string(status), fmt.Sprintf("\nUid:\t%d\t%[1]d\t%[1]d\t%[1]d\n", uid)) ||
		!strings.Contains(string(status), "\nCapEff:\t0000000000000000\n") {
		s.t.Errorf("it is not the user %d without capabilities: %v\n%s", uid, err, status)
	}
}

// probed asks the host for what a cluster asks for.
func (s *server) probed(address string) {
	s.t.Helper()
	for path, says := range map[string]string{"/livez": "", "/readyz": "", "/metrics": "kvhost_build_info"} {
		r, err := http.Get("http://" + address + path)
		testenv.OK(s.t, err)
		var body bytes.Buffer
		_, err = body.ReadFrom(r.Body)
		r.Body.Close()
		if err != nil || r.StatusCode != http.StatusOK || !strings.Contains(body.String(), says) {
			s.t.Errorf("get %s: %s, %v\n%s", path, r.Status, err, body.String())
		}
	}
}

// stop ends the host in order.
func (s *server) stop() {
	s.t.Helper()
	testenv.OK(s.t, syscall.Kill(s.pid, syscall.SIGTERM))
	<-s.ended
	if code := s.cmd.ProcessState.ExitCode(); code != 0 {
		s.t.Errorf("exit code %d\n%s", code, s.logged())
	}
}
