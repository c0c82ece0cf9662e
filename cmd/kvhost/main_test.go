package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvhost/kvhost/plugins/dist"
)

// binary is the built command.
var binary string

const mixedTrace = "../../examples/traces/mixed.jsonl.zst"

func TestMain(m *testing.M) { os.Exit(testMain(m)) }

func testMain(m *testing.M) int {
	if !slices.Contains(dist.Names(), "lru") {
		fmt.Fprintln(os.Stderr, "no embedded policies: run `make plugins` first")
		return 1
	}
	dir, err := os.MkdirTemp("", "kvhost-test-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	binary = filepath.Join(dir, "kvhost")
	build := exec.Command("go", "build", "-o", binary, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "go build: %v\n%s", err, out)
		return 1
	}
	return m.Run()
}

// command is the binary in a directory of its own, with nothing of the tester's environment that it would read.
func command(t *testing.T, dir string, args ...string) *exec.Cmd {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, binary, args...)
	cmd.Dir = dir
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, "KVHOST_") {
			cmd.Env = append(cmd.Env, v)
		}
	}
	return cmd
}

type result struct {
	code           int
	stdout, stderr string
}

func finish(t *testing.T, cmd *exec.Cmd) result {
	t.Helper()
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	if _, exited := err.(*exec.ExitError); err != nil && !exited {
		t.Fatal(err)
	}
	r := result{cmd.ProcessState.ExitCode(), stdout.String(), stderr.String()}
	if strings.Contains(r.stderr, "goroutine ") {
		t.Errorf("%v panicked:\n%s", cmd.Args, r.stderr)
	}
	return r
}

// shortDir is a directory whose path leaves room for a socket's.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "kv")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func absolute(t *testing.T, path string) string {
	t.Helper()
	abs, err := filepath.Abs(path)
	if err != nil {
		t.Fatal(err)
	}
	return abs
}

func write(t *testing.T, dir, name, text string) string {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// Wrong input has a clear error and its exit code, and never a panic.
func TestWrongInput(t *testing.T) {
	dir := shortDir(t)
	whole, err := os.ReadFile(mixedTrace)
	if err != nil {
		t.Fatal(err)
	}
	write(t, dir, "cut.jsonl.zst", string(whole[:len(whole)/2]))
	write(t, dir, "bad.jsonl", `{"timestamp":0,"input_length":1,"output_length":1,"hash_ids":[1,x]}`+"\n")
	write(t, dir, "not.wasm", "this is no module")
	write(t, dir, "syntax.toml", "[log]\nlevel = \n")
	write(t, dir, "unknown.toml", "[log]\n\nlevle = 'info'\n")
	write(t, dir, "type.toml", "[engine]\nthreads_per_gpu = 'many'\n")
	write(t, dir, "role.toml", "[[policy]]\nmodule = 'lru.wasm'\nroles = ['place']\n")
	write(t, dir, "setting.toml", "[[policy]]\nmodule = 'lru.wasm'\n[policy.config]\nno_such_setting = 1\n")
	trace := absolute(t, mixedTrace)
	for _, test := range []struct {
		name string
		args []string
		code int
		says []string
	}{
		{"unknown command", []string{"serv"}, exitUsage, []string{`"serv"`, "serve", "--help"}},
		{"unknown flag", []string{"--no-such-flag"}, exitUsage, []string{"--no-such-flag", "--help"}},
		{"argument", []string{"version", "x"}, exitUsage, []string{"takes no arguments"}},
		{"bad flag value", []string{"--log-level", "loud"}, exitUsage, []string{"--log-level", "debug, info"}},
		{"bad number", []string{"replay", "--ranks", "two"}, exitUsage, []string{"--ranks"}},
		{"missing file", []string{"--config", "none.toml"}, exitUsage, []string{"none.toml"}},
		{"TOML syntax", []string{"--config", "syntax.toml"}, exitUsage, []string{"syntax.toml:2"}},
		{"TOML key", []string{"--config", "unknown.toml"}, exitUsage, []string{"unknown.toml:3", "log.levle", `did you mean "level"`}},
		{"TOML type", []string{"config", "--config", "type.toml"}, exitUsage, []string{"type.toml:2", "engine.threads_per_gpu", "whole number"}},
		{"not loopback", []string{"--http-listen", "0.0.0.0:80"}, exitUsage, []string{"--http-listen", "loopback"}},
		{"policy missing", []string{"--policy", "none/such.wasm"}, exitPolicy, []string{"none/such.wasm"}},
		{"policy name", []string{"--policy", "lur"}, exitPolicy, []string{"lur", "lru"}},
		{"policy unreadable", []string{"--policy", "/dev/null/x.wasm"}, exitPolicy, []string{"/dev/null/x.wasm"}},
		{"policy not a module", []string{"--policy", "./not.wasm"}, exitPolicy, []string{"not.wasm", "WebAssembly"}},
		{"policy without the role", []string{"--config", "role.toml"}, exitPolicy, []string{"lru.wasm", `"place"`, "evict"}},
		{"policy setting", []string{"--config", "setting.toml"}, exitPolicy, []string{"no_such_setting"}},
		{"two of a role", []string{"--policy", "lru.wasm", "--policy", "fifo.wasm"}, exitPolicy, []string{"lru", "fifo", "evict"}},
		{"root is a file", []string{"--root", "cut.jsonl.zst", "--http-listen", ""}, exitFailure, []string{"cut.jsonl.zst"}},
		{"trace cut", []string{"replay", "--embedded", "--trace", "cut.jsonl.zst"}, exitTrace, []string{"cut.jsonl.zst:", "ends early"}},
		{"trace bad", []string{"replay", "--embedded", "--trace", "bad.jsonl"}, exitTrace, []string{"bad.jsonl:1", "hash id"}},
		{"trace missing", []string{"replay", "--embedded", "--trace", "none.jsonl"}, exitTrace, []string{"none.jsonl"}},
		{"trace info missing", []string{"trace", "info", "none.jsonl"}, exitTrace, []string{"none.jsonl"}},
		{"trace info of nothing", []string{"trace", "info"}, exitUsage, []string{"want a trace file"}},
		{"trace alone", []string{"trace"}, exitUsage, []string{"gen or info"}},
		{"trace gen", []string{"trace", "gen", "--requests", "0"}, exitUsage, []string{"0 requests"}},
		{"replay without trace", []string{"replay"}, exitUsage, []string{"--trace"}},
		{"replay shape", []string{"replay", "--embedded", "--trace", trace, "--chunk-bytes", "100", "--page-bytes", "64"}, exitUsage, []string{"pages of 64 bytes"}},
		{"replay capacity", []string{"replay", "--embedded", "--trace", trace, "--capacity", "lots"}, exitUsage, []string{"--capacity", "lots"}},
		{"replay zero capacity", []string{"replay", "--embedded", "--trace", trace, "--capacity", "0"}, exitUsage, []string{"--capacity"}},
		{"replay capacity of another's host", []string{"replay", "--trace", trace, "--capacity", "5"}, exitUsage, []string{"--embedded"}},
		{"replay without host", []string{"replay", "--trace", trace, "--socket", "none.sock"}, exitFailure, []string{"none.sock"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := finish(t, command(t, dir, test.args...))
			if r.code != test.code {
				t.Errorf("exit code %d, want %d", r.code, test.code)
			}
			for _, want := range append(test.says, "kvhost: ") {
				if !strings.Contains(r.stderr, want) {
					t.Errorf("standard error does not say %q:\n%s", want, r.stderr)
				}
			}
		})
	}
}

func TestHelpers(t *testing.T) {
	dir := shortDir(t)
	for _, test := range []struct {
		args []string
		says []string
	}{
		{[]string{"--help"}, []string{"Exit codes:", "kvhost --policy lru.wasm", "replay", "--engine-threads-per-gpu"}},
		{[]string{"replay", "--help"}, []string{"Examples:", "--chunk-bytes", "--evict"}},
		{[]string{"version"}, []string{"policy abi 1", "lru"}},
		{[]string{"--version"}, []string{"kvhost"}},
		{[]string{"completion", "bash"}, []string{"__start_kvhost"}},
		{[]string{"config", "--store-evict", "background"}, []string{`evict = "background" # flag --store-evict`, "# default"}},
		{[]string{"trace", "info", absolute(t, mixedTrace)}, []string{"infinite cache", "reuse gap"}},
	} {
		r := finish(t, command(t, dir, test.args...))
		if r.code != exitOK {
			t.Errorf("%v: exit code %d\n%s", test.args, r.code, r.stderr)
		}
		for _, want := range test.says {
			if !strings.Contains(r.stdout, want) {
				t.Errorf("%v does not say %q:\n%s", test.args, want, r.stdout)
			}
		}
	}
	example, err := os.ReadFile("../../examples/kvhost.toml")
	if err != nil {
		t.Fatal(err)
	}
	if r := finish(t, command(t, dir, "config", "--defaults")); r.stdout != string(example) {
		t.Error("config --defaults is not examples/kvhost.toml")
	}
	cmd := command(t, dir, "config")
	cmd.Env = append(cmd.Env, "KVHOST_CONFIG="+absolute(t, "../../examples/kvhost.toml"), "KVHOST_LOG_LEVEL=warn", "KVHOST_LOGLEVEL=x")
	if r := finish(t, cmd); r.code != exitOK || !strings.Contains(r.stdout, "# env KVHOST_LOG_LEVEL") || !strings.Contains(r.stdout, "kvhost.toml:") ||
		!strings.Contains(r.stderr, "KVHOST_LOGLEVEL") {
		t.Errorf("environment: %d\n%s%s", r.code, r.stdout, r.stderr)
	}
}

// The documented command makes the committed trace, whatever the packing.
func TestTraceGen(t *testing.T) {
	dir := shortDir(t)
	for _, name := range []string{"a.jsonl", "a.jsonl.gz", "a.jsonl.zst"} {
		if r := finish(t, command(t, dir, "trace", "gen", "--out", name)); r.code != exitOK {
			t.Fatalf("%s: %s", name, r.stderr)
		}
	}
	describe := func(path string) string {
		r := finish(t, command(t, dir, "trace", "info", "--json", path))
		var fields map[string]any
		if err := json.Unmarshal([]byte(r.stdout), &fields); err != nil {
			t.Fatalf("%s: %v\n%s", path, err, r.stderr)
		}
		delete(fields, "trace")
		return fmt.Sprint(fields)
	}
	want := describe(absolute(t, mixedTrace))
	for _, name := range []string{"a.jsonl", "a.jsonl.gz", "a.jsonl.zst"} {
		if got := describe(name); got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
	}
	plain, err := os.ReadFile(filepath.Join(dir, "a.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	if r := finish(t, command(t, dir, "trace", "gen")); r.stdout != string(plain) {
		t.Error("standard output and file differ")
	}
}

func freePort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

func healthy(t *testing.T, address string) bool {
	t.Helper()
	r, err := http.Get("http://" + address + "/healthz")
	if err != nil {
		return false
	}
	defer r.Body.Close()
	return r.StatusCode == http.StatusOK
}

// startHost starts a host and waits until its log says that it is ready. stop ends it with a signal and gives its exit code
// and log.
func startHost(t *testing.T, dir string, args ...string) (cmd *exec.Cmd, logged func() string, stop func(os.Signal) int) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "log")
	file, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	cmd = command(t, dir, args...)
	cmd.Stderr = file
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { cmd.Wait(); close(ended) }()
	t.Cleanup(func() { cmd.Process.Kill(); <-ended })
	logged = func() string {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	await(t, logged, `"msg":"ready"`, ended)
	return cmd, logged, func(s os.Signal) int {
		cmd.Process.Signal(s)
		<-ended
		return cmd.ProcessState.ExitCode()
	}
}

func await(t *testing.T, logged func() string, text string, ended <-chan struct{}) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !strings.Contains(logged(), text); time.Sleep(10 * time.Millisecond) {
		select {
		case <-ended:
			t.Fatalf("the host ended:\n%s", logged())
		default:
		}
		if time.Now().After(deadline) {
			t.Fatalf("no %s in a minute:\n%s", text, logged())
		}
	}
}

// A host starts in an empty directory with a policy's name alone, keeps others off its root and socket, serves a replay,
// changes its log level at a signal, and ends cleanly at another.
func TestServe(t *testing.T) {
	dir := shortDir(t)
	address := freePort(t)
	cmd, logged, stop := startHost(t, dir, "--policy", "lru.wasm", "--http-listen", address)
	if !healthy(t, address) {
		t.Error("/healthz does not answer 200")
	}
	if r := finish(t, command(t, dir, "--socket", "b.sock", "--http-listen", "")); r.code != exitRootBusy || !strings.Contains(r.stderr, "kvhost-data") {
		t.Errorf("second host on the root: exit code %d\n%s", r.code, r.stderr)
	}
	if r := finish(t, command(t, dir, "--root", "other", "--http-listen", "")); r.code != exitAddress || !strings.Contains(r.stderr, "kvhost.sock") {
		t.Errorf("second host on the socket: exit code %d\n%s", r.code, r.stderr)
	}
	if r := finish(t, command(t, dir, "--root", "other", "--socket", "b.sock", "--http-listen", address)); r.code != exitAddress || !strings.Contains(r.stderr, address) {
		t.Errorf("second host on the HTTP address: exit code %d\n%s", r.code, r.stderr)
	}
	r := finish(t, command(t, dir, "replay", "--trace", absolute(t, mixedTrace), "--limit", "40", "--sessions", "2", "--ranks", "2", "--chunk-bytes", "8192", "--json"))
	var report struct {
		Requests, Hits  int64
		MismatchedBytes *int64 `json:"mismatched_bytes"`
		Policies        []struct{ Role, Module, Digest string }
	}
	if err := json.Unmarshal([]byte(r.stdout), &report); err != nil || r.code != exitOK {
		t.Fatalf("replay: exit code %d, %v\n%s", r.code, err, r.stderr)
	}
	if report.Requests != 40 || report.Hits == 0 || report.MismatchedBytes == nil || *report.MismatchedBytes != 0 {
		t.Errorf("replay: %+v", report)
	}
	lru := false
	for _, p := range report.Policies {
		lru = lru || p.Role == "evict" && p.Module == "lru" && len(p.Digest) == 64
	}
	if !lru {
		t.Errorf("no lru with its digest among %+v", report.Policies)
	}
	for _, level := range []string{"DEBUG", "INFO"} {
		cmd.Process.Signal(syscall.SIGUSR2)
		await(t, logged, `"log level switched","to":"`+level, nil)
	}
	if code := stop(syscall.SIGTERM); code != exitOK {
		t.Errorf("SIGTERM: exit code %d\n%s", code, logged())
	}
	if _, err := os.Stat(filepath.Join(dir, "kvhost.sock")); !os.IsNotExist(err) {
		t.Errorf("the socket is still there: %v", err)
	}
	_, logged, stop = startHost(t, dir, "--http-listen", "") // and starts again on what it left
	if code := stop(syscall.SIGINT); code != exitOK {
		t.Errorf("SIGINT: exit code %d\n%s", code, logged())
	}
}

// An embedded replay leaves nothing behind but the store it was told to keep, and finds that again.
func TestEmbeddedReplay(t *testing.T) {
	dir := shortDir(t)
	args := []string{"replay", "--embedded", "--trace", absolute(t, mixedTrace), "--limit", "30", "--chunk-bytes", "4096",
		"--store", "kept", "--capacity", "2000", "--policy", "fifo.wasm", "--evict", "background", "--json"}
	hits := [2]int64{}
	for i := range hits {
		cmd := command(t, dir, args...)
		cmd.Env = append(cmd.Env, "TMPDIR="+dir)
		r := finish(t, cmd)
		var report struct{ Hits, Accesses int64 }
		if err := json.Unmarshal([]byte(r.stdout), &report); err != nil || r.code != exitOK {
			t.Fatalf("exit code %d, %v\n%s", r.code, err, r.stderr)
		}
		if hits[i] = report.Hits; i == 1 && report.Hits != report.Accesses {
			t.Errorf("%d of %d found again", report.Hits, report.Accesses)
		}
	}
	if hits[0] >= hits[1] {
		t.Errorf("%d hits, then %d", hits[0], hits[1])
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 1 || entries[0].Name() != "kept" {
		t.Errorf("left behind: %v, %v", entries, err)
	}
}

// A full disk fails the stores that do not fit, by name, and harms nothing else: what was stored is served right.
func TestFullDisk(t *testing.T) {
	dir := shortDir(t)
	script := fmt.Sprintf("mount --make-rprivate / && mount -t tmpfs -o size=4m kvhost-test %s && exec %s replay --embedded --trace %s --limit 40 --store %s --capacity 1GiB --json",
		dir, binary, absolute(t, mixedTrace), filepath.Join(dir, "s"))
	cmd := command(t, "/")
	cmd.Path, cmd.Args = "/bin/sh", []string{"sh", "-c", script}
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS} // the mount ends with the process
	if os.Geteuid() != 0 {
		cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{HostID: os.Geteuid(), Size: 1}}
	}
	r := finish(t, cmd)
	var report struct {
		Hits, Stored    int64
		FailedStores    int64 `json:"failed_stores"`
		FailedLoads     int64 `json:"failed_loads"`
		MismatchedBytes int64 `json:"mismatched_bytes"`
	}
	if err := json.Unmarshal([]byte(r.stdout), &report); err != nil {
		t.Fatalf("exit code %d, %v\n%s", r.code, err, r.stderr)
	}
	if r.code != exitFailure || !strings.Contains(r.stderr, "no space left on device") {
		t.Errorf("exit code %d\n%s", r.code, r.stderr)
	}
	if report.Stored == 0 || report.Hits == 0 || report.FailedStores == 0 || report.FailedLoads != 0 || report.MismatchedBytes != 0 {
		t.Errorf("report %+v", report)
	}
}
