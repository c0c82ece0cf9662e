package command

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/testkit/policytest"
)

// binary is the built command.
var binary string

const mixedTrace = "../../examples/traces/mixed.jsonl.zst"

func TestMain(m *testing.M) { os.Exit(testMain(m)) }

func testMain(m *testing.M) int {
	if text := os.Getenv(attackEnv); text != "" {
		return attackMain(text)
	}
	if binary = os.Getenv("KVHOST_BIN"); binary != "" { // built elsewhere: this machine may have no Go
		return m.Run()
	}
	overlay, err := policytest.Overlay()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	dir, err := os.MkdirTemp("", "kvhost-test-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	binary = filepath.Join(dir, "kvhost")
	build := exec.Command("go", "build", "-overlay", overlay, "-trimpath", "-tags=grpcnotrace",
		"-ldflags=-s -w", "-o", binary, "../../cmd/kvhost")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "go build: %v\n%s", err, out)
		return 1
	}
	return m.Run()
}

// The binary has in it the policies that an operator would choose, and stays small.
func TestBinarySize(t *testing.T) {
	info, err := os.Stat(binary)
	testenv.OK(t, err)
	// 0.3 MB are the kernels that code extents on a GPU, 1.4 MB are for S3, and 0.6 MB for hosts that lend each other, by NIXL too.
	const limit = 29_100_000
	if info.Size() > limit {
		t.Errorf("the binary has %d bytes, at most %d", info.Size(), limit)
	}
}

// noMemory leaves a host the roots that its test names, without memory before them.
const noMemory = "KVHOST_STORE_MEMORY=0"

// command runs the binary in a directory, without KVHOST_ variables of the tester's environment. It is killed when the
// test ends, and not before: a host or a replay may take minutes on a machine that is busy.
func command(t *testing.T, dir string, args ...string) *exec.Cmd {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, binary, args...)
	cmd.Dir = dir
	cmd.Env = append(cmd.Env, noMemory)
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

// shortDir is as testenv.Dir, but on the disk: for links to the binary, and for direct I/O.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp(testenv.ShortTemp(), "kv")
	testenv.OK(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func absolute(t *testing.T, path string) string {
	t.Helper()
	abs, err := filepath.Abs(path)
	testenv.OK(t, err)
	return abs
}

func write(t *testing.T, dir, name, text string) string {
	t.Helper()
	path := filepath.Join(dir, name)
	testenv.OK(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

// Wrong input has a clear error and its exit code, and never a panic.
func TestWrongInput(t *testing.T) {
	dir := shortDir(t)
	whole, err := os.ReadFile(mixedTrace)
	testenv.OK(t, err)
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
		{"misspelled command", []string{"srve"}, exitUsage, []string{`did you mean "serve"?`}},
		{"no shell", []string{"completion"}, exitUsage, []string{"want one of bash, zsh, fish, powershell"}},
		{"unknown shell", []string{"completion", "zzz"}, exitUsage, []string{`unknown command "zzz"; want one of bash, zsh, fish, powershell`, "completion --help"}},
		{"sim in two forms", []string{"sim", "--trace", trace, "--json", "--csv"}, exitUsage, []string{"--csv", "--json"}},
		{"misspelled subcommand", []string{"policy", "lst"}, exitUsage, []string{`did you mean "list"?`}},
		{"configuration as a command", []string{"foo.toml"}, exitUsage, []string{"--config foo.toml"}},
		{"unknown flag", []string{"--no-such-flag"}, exitUsage, []string{"--no-such-flag", "--help"}},
		{"misspelled flag", []string{"--polcy", "lru"}, exitUsage, []string{`did you mean "--policy"`}},
		{"bench of a missing root", []string{"bench", "--root", "nowhere"}, exitUsage,
			[]string{"nowhere", "create it"}},
		{"sim without a chunk's size", []string{"sim", "--trace", trace, "--capacity", "10GiB"}, exitUsage,
			[]string{"10GiB", "--chunk-bytes"}},
		{"argument", []string{"version", "x"}, exitUsage, []string{"takes no arguments"}},
		{"bad flag value", []string{"--log-level", "loud"}, exitUsage, []string{"--log-level", "debug, info"}},
		{"bad number", []string{"replay", "--ranks", "two"}, exitUsage, []string{"--ranks"}},
		{"missing file", []string{"--config", "none.toml"}, exitUsage, []string{"none.toml"}},
		{"TOML syntax", []string{"--config", "syntax.toml"}, exitUsage, []string{"syntax.toml:2"}},
		{"TOML key", []string{"--config", "unknown.toml"}, exitUsage,
			[]string{"unknown.toml", "log.levle", `did you mean "level"`}},
		{"TOML type", []string{"config", "--config", "type.toml"}, exitUsage,
			[]string{"type.toml", "engine.threads_per_gpu", "whole number"}},
		{"every interface, unnamed", []string{"--http-listen", ":80"}, exitUsage, []string{"--http-listen", "0.0.0.0"}},
		{"policy missing", []string{"--policy", "none/such.wasm"}, exitPolicy, []string{"none/such.wasm"}},
		{"policy name", []string{"--policy", "lur"}, exitPolicy, []string{"lur", "lru"}},
		{"policy unreadable", []string{"--policy", "/dev/null/x.wasm"}, exitPolicy, []string{"/dev/null/x.wasm"}},
		{"policy not a module", []string{"--policy", "./not.wasm"}, exitPolicy, []string{"not.wasm", "WebAssembly"}},
		{"policy without the role", []string{"--config", "role.toml"}, exitPolicy,
			[]string{"lru.wasm", `"place"`, "evict"}},
		{"policy setting", []string{"--config", "setting.toml"}, exitPolicy, []string{"no_such_setting"}},
		{"two of a role", []string{"--policy", "lru.wasm", "--policy", "fifo.wasm"}, exitPolicy,
			[]string{"lru", "fifo", "evict"}},
		{"root is a file", []string{"--root", "cut.jsonl.zst", "--http-listen", ""}, exitFailure,
			[]string{"cut.jsonl.zst"}},
		{"trace cut", []string{"replay", "--embedded", "--trace", "cut.jsonl.zst"}, exitTrace,
			[]string{"cut.jsonl.zst:", "ends early"}},
		{"trace bad", []string{"replay", "--embedded", "--trace", "bad.jsonl"}, exitTrace,
			[]string{"bad.jsonl:1", "not a request"}},
		{"trace missing", []string{"replay", "--embedded", "--trace", "none.jsonl"}, exitTrace, []string{"none.jsonl"}},
		{"replay without trace", []string{"replay"}, exitUsage, []string{"--trace"}},
		{"replay shape", []string{"replay", "--embedded", "--trace", trace, "--chunk-bytes", "20000"}, exitUsage,
			[]string{"pages of 16384 bytes"}},
		{"replay as it was once", []string{"replay", "--page-bytes", "64"}, exitUsage, []string{"it is gone: a page has 16KiB"}},
		{"replay capacity", []string{"replay", "--embedded", "--trace", trace, "--capacity", "lots"}, exitUsage,
			[]string{"--capacity", "lots"}},
		{"replay zero capacity", []string{"replay", "--embedded", "--trace", trace, "--capacity", "0"}, exitUsage,
			[]string{"--capacity"}},
		{"replay capacity of another's host", []string{"replay", "--trace", trace, "--capacity", "5"}, exitUsage,
			[]string{"--embedded"}},
		{"replay without host", []string{"replay", "--trace", trace, "--socket", "none.sock"}, exitFailure,
			[]string{"none.sock"}},
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
		{[]string{"--help"}, []string{"kvhost --policy lru.wasm", "replay", "--help-all"}},
		{[]string{"--help-all"}, []string{"Exit codes:", "kvhost --policy lru.wasm", "replay",
			"--engine-threads-per-gpu"}},
		{[]string{"serve", "--help-all"}, []string{"Exit codes:", "SIGHUP", "--engine-threads-per-gpu"}},
		{[]string{"replay", "--help"}, []string{"Examples:", "--chunk-bytes", "--embedded"}},
		{[]string{"version"}, []string{"policy abi 1", "lru"}},
		{[]string{"version", "--json"}, []string{`"policy_abi": 1`}},
		{[]string{"__complete", "sim", "--policy", "l"}, []string{"lru.wasm\n"}},
		{[]string{"__complete", "fsck", ""}, []string{":16\n"}},
		{[]string{"__complete", "check", "--config", ""}, []string{"toml\n:8\n"}},
		{[]string{"--version"}, []string{"kvhost"}},
		{[]string{"completion", "bash"}, []string{"__start_kvhost"}},
		{[]string{"config", "--store-durability", "strict"}, []string{`durability = "strict" # flag --store-durability`,
			"# default"}},
		{[]string{"config", "--json", "--log-level", "warn"}, []string{`"level": "warn"`, `"log.level": "flag --log-level"`, `"path": "kvhost-data"`}},
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
	if r := finish(t, command(t, dir, "bogus", "--help")); r.code != exitUsage || !strings.Contains(r.stderr, `unknown command "bogus"`) {
		t.Errorf("help of a command that is not there: %+v, want exit code %d", r, exitUsage)
	}
	if r := finish(t, command(t, dir, "--help")); strings.Count(r.stdout, "\n") > 54 ||
		strings.Contains(r.stdout, "--engine-threads-per-gpu") {
		t.Errorf("--help is long:\n%s", r.stdout)
	}
	example, err := os.ReadFile("../../examples/kvhost.toml")
	testenv.OK(t, err)
	if r := finish(t, command(t, dir, "config", "--defaults")); r.stdout != string(example) {
		t.Error("config --defaults is not examples/kvhost.toml")
	}
	cmd := command(t, dir, "config")
	cmd.Env = append(cmd.Env, "KVHOST_CONFIG="+absolute(t, "../../examples/kvhost.toml"), "KVHOST_LOG_LEVEL=warn",
		"KVHOST_LOGLEVEL=x")
	if r := finish(t, cmd); r.code != exitOK || !strings.Contains(r.stdout, "# env KVHOST_LOG_LEVEL") ||
		!strings.Contains(r.stdout, "kvhost.toml:") ||
		!strings.Contains(r.stderr, "KVHOST_LOGLEVEL") {
		t.Errorf("environment: %d\n%s%s", r.code, r.stdout, r.stderr)
	}
}

func TestReflow(t *testing.T) {
	got := reflow("one two three\nfour five\n\nCodes:\n  0  fine\n  1  a longer line than all\n\nlast", 13)
	want := "one two three\nfour five\n\nCodes:\n  0  fine\n  1  a longer line than all\n\nlast"
	if got != want {
		t.Errorf("a reflowed text: got %q, want %q", got, want)
	}
	if got, want := reflow("a bb ccc dddd", 4), "a bb\nccc\ndddd"; got != want {
		t.Errorf("a word wider than the line: got %q, want %q", got, want)
	}
}
