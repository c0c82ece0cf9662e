package command

import (
	"context"
	"encoding/json"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/store/evictor"
)

// anyPort is an address to listen on. The kernel chooses the port when the host binds it, so that nobody else can take it
// before.
const anyPort = "127.0.0.1:0"

// httpAddress is where a host serves HTTP, as its log says.
func httpAddress(t *testing.T, logged func() string) string {
	t.Helper()
	for line := range strings.Lines(logged()) {
		var ready struct{ Msg, HTTP string }
		if json.Unmarshal([]byte(line), &ready) == nil && ready.HTTP != "" {
			return ready.HTTP
		}
	}
	t.Fatalf("the host is not ready:\n%s", logged())
	return ""
}

func healthy(t *testing.T, address string) bool {
	t.Helper()
	r, err := http.Get("http://" + address + "/readyz")
	if err != nil {
		return false
	}
	defer r.Body.Close()
	return r.StatusCode == http.StatusOK
}

// startHost starts a host and waits until its log says that it is ready, or why not. stop ends it with a signal and returns its
// exit code.
func startHost(t *testing.T, dir string, args ...string) (cmd *exec.Cmd, logged func() string,
	stop func(os.Signal) int) {
	t.Helper()
	return startCommand(t, command(t, dir, args...))
}

func startCommand(t *testing.T, cmd *exec.Cmd) (_ *exec.Cmd, logged func() string, stop func(os.Signal) int) {
	t.Helper()
	logged, ended, stop := launch(t, cmd)
	await(t, logged, `"http":`, ended)
	return cmd, logged, stop
}

// launch starts a command whose log is read while it runs. ended is closed when it has ended; stop is as of startHost.
func launch(t *testing.T, cmd *exec.Cmd) (logged func() string, ended <-chan struct{}, stop func(os.Signal) int) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "log")
	file, err := os.Create(path)
	testenv.OK(t, err)
	defer file.Close()
	cmd.Stderr = file
	testenv.OK(t, cmd.Start())
	end := make(chan struct{})
	go func() { cmd.Wait(); close(end) }()
	t.Cleanup(func() {
		cmd.Process.Kill()
		<-end
		if text := logged(); t.Failed() {
			t.Logf("%s, its log ends with\n%s", cmd.ProcessState, text[max(0, len(text)-4<<10):])
		}
	})
	logged = func() string {
		text, err := os.ReadFile(path)
		testenv.OK(t, err)
		return string(text)
	}
	return logged, end, func(s os.Signal) int {
		cmd.Process.Signal(s)
		<-end
		return cmd.ProcessState.ExitCode()
	}
}

// until polls for what has no event of its own in another process.
func until(t *testing.T, what string, done func() bool, state ...func() any) {
	t.Helper()
	testenv.Until(t, what, done, state...)
}

func await(t *testing.T, logged func() string, text string, ended <-chan struct{}) {
	t.Helper()
	testenv.Until(t, text+" in the log", func() bool {
		select {
		case <-ended:
			t.Fatalf("the host ended:\n%s", logged())
		default:
		}
		return strings.Contains(logged(), text)
	}, func() any { return logged() })
}

// A host starts in an empty directory with only the name of a policy, refuses a second host on its root, socket and
// address, serves a replay, and ends cleanly at a signal.
func TestServe(t *testing.T) {
	dir := shortDir(t)
	_, logged, stop := startHost(t, dir, "--policy", "lru.wasm", "--http-listen", anyPort)
	address := httpAddress(t, logged)
	if !healthy(t, address) {
		t.Error("/readyz does not answer 200")
	}
	if r := finish(t, command(t, dir, "--socket", "b.sock", "--http-listen", "")); r.code != exitRootBusy ||
		!strings.Contains(r.stderr, "kvhost-data") {
		t.Errorf("second host on the root: exit code %d\n%s", r.code, r.stderr)
	}
	if r := finish(t, command(t, dir, "--root", "other", "--http-listen", "")); r.code != exitAddress ||
		!strings.Contains(r.stderr, "kvhost.sock") {
		t.Errorf("second host on the socket: exit code %d\n%s", r.code, r.stderr)
	}
	if r := finish(t, command(t, dir, "--root", "other", "--socket", "b.sock", "--http-listen",
		address)); r.code != exitAddress || !strings.Contains(r.stderr, address) {
		t.Errorf("second host on the HTTP address: exit code %d\n%s", r.code, r.stderr)
	}
	r := finish(t, command(t, dir, "replay", "--trace", absolute(t, mixedTrace), "--limit", "40", "--sessions", "2",
		"--ranks", "2", "--chunk-bytes", "8192", "--json"))
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

// The log says ready where /readyz does, and before that what is in the way.
func TestReadyIsAsTheProbeSays(t *testing.T) {
	dir := shortDir(t)
	_, logged, _ := startHost(t, dir, "--root", "gone/kv=64MiB", "--root", "there=64MiB", "--http-listen", anyPort)
	address := httpAddress(t, logged)
	if text := logged(); healthy(t, address) || strings.Contains(text, `"msg":"ready"`) || !strings.Contains(text, "mkdir -p ") ||
		!strings.Contains(text, `"why":["root gone/kv is out of service`) {
		t.Errorf("a root is out, and /readyz answers 200 or the log says ready, or not why it is not:\n%s", text)
	}
	testenv.OK(t, os.Mkdir(filepath.Join(dir, "gone"), 0o700))
	until(t, "ready in the log", func() bool { return strings.Contains(logged(), `"msg":"ready"`) })
	if !healthy(t, address) {
		t.Error("the log says ready, and /readyz does not answer 200")
	}
}

// An embedded replay leaves only the store that it was to keep, and finds that again.
func TestEmbeddedReplay(t *testing.T) {
	dir := shortDir(t)
	args := []string{"replay", "--embedded", "--trace", absolute(t, mixedTrace), "--limit", "30", "--chunk-bytes",
		"4096",
		"--store", "kept", "--capacity", "2000", "--policy", "fifo.wasm", "--json"}
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

// An embedded replay through configured levels moves chunks between them. What is asked for next is near: a level for a thirtieth of the
// chunks serves most of the hits, however slowly it copies what it evicts, which costs hits at the speed of a replay.
func TestReplayThroughLevels(t *testing.T) {
	dir := shortDir(t)
	write := func(name, text string) {
		testenv.OK(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	far := "[[root]]\npath = \"far\"\ncapacity = \"64MiB\"\nlevel = 1\n"
	write("alone.toml", far)
	write("levels.toml", "[[root]]\npath = \"memory:\"\ncapacity = \"2MiB\"\n"+far+
		"[[policy]]\nmodule = \"reuse\"\nlevels = [1]\nconfig = { least = 0 }\n")
	type result struct {
		Hits   int64
		Levels []struct {
			Loaded int64 `json:"bytes_loaded"`
		}
	}
	var results [2]result
	for i, config := range []string{"alone.toml", "levels.toml"} {
		testenv.OK(t, os.RemoveAll(filepath.Join(dir, "far")))
		r := finish(t, command(t, dir, "replay", "--embedded", "--with-roots", "--config", config, "--trace",
			absolute(t, mixedTrace), "--limit", "200", "--chunk-bytes", "4096", "--json"))
		if err := json.Unmarshal([]byte(r.stdout), &results[i]); err != nil || r.code != exitOK {
			t.Fatalf("exit code %d, %v\n%s", r.code, err, r.stderr)
		}
	}
	alone, behind := results[0], results[1]
	if behind.Hits < alone.Hits/2 || len(behind.Levels) != 2 || 2*behind.Levels[0].Loaded < behind.Levels[0].Loaded+behind.Levels[1].Loaded {
		t.Errorf("%d hits in one root, and behind a smaller one %+v: want half as many, and most from near", alone.Hits, behind)
	}
	if pieces, err := filepath.Glob(filepath.Join(dir, "far", "*", "*", "*", "*.kv")); err != nil || len(pieces) == 0 {
		t.Errorf("%d pieces in the farther root, %v", len(pieces), err)
	}
}

// A full disk fails the stores that do not fit, by name, and nothing else: what was stored is served correctly.
func TestFullDisk(t *testing.T) {
	testenv.Need(t, testenv.Mounts)
	dir := shortDir(t)
	const script = `mount --make-rprivate / && mount -t tmpfs -o size=4m kvhost-test "$1" && ` +
		`exec "$0" replay --embedded --trace "$2" --limit 40 --store "$1/s" --capacity 1GiB --json`
	cmd := command(t, "/")
	cmd.Path, cmd.Args = "/bin/sh", []string{"sh", "-c", script, binary, dir, absolute(t, mixedTrace)}
	cmd.SysProcAttr = testenv.MountNamespace() // the mount ends with the process
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
	if report.Stored == 0 || report.Hits == 0 || report.FailedStores == 0 || report.FailedLoads != 0 ||
		report.MismatchedBytes != 0 {
		t.Errorf("report %+v", report)
	}
}

// A signal during the start is no failure, and above all not the policy's.
func TestStoppedWhileStarting(t *testing.T) {
	dir := shortDir(t)
	module := module(t, dir, "mine.wasm", "lru")
	s := settings{given: []config.Setting{
		{Key: "policy", Value: module}, {Key: "root", Value: filepath.Join(dir, "kv")},
		{Key: "policy_cache", Value: ""},
		{Key: "socket", Value: filepath.Join(dir, "s")}, {Key: "http.listen", Value: ""},
	}}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := serve(ctx, &s); err != nil {
		t.Errorf("exit code %d: %v", exitCode(err), err)
	}
}

// A host takes memory before its root of its own accord, and says so; memory = 0 turns it off.
func TestMemoryByDefault(t *testing.T) {
	t.Parallel()
	for setting, want := range map[string]bool{"auto": true, "0": false} {
		dir := shortDir(t)
		args := []string{"--root", "kv=1GiB", "--socket", "s", "--http-listen", anyPort, "--store-memory", setting}
		_, logged, stop := startHost(t, dir, args...)
		if got := strings.Contains(logged(), `"memory before the roots","bytes":`); got != want {
			t.Errorf("store.memory %s: the log says that there is memory: %v, want %v", setting, got, want)
		}
		r := finish(t, command(t, dir, "status", "--socket", "s"))
		if got := strings.Contains(r.stdout, "memory:"); got != want || r.code != 0 {
			t.Errorf("store.memory %s: status shows memory: %v, want %v (exit %d): %s", setting, got, want, r.code, r.stdout)
		}
		if code := stop(syscall.SIGTERM); code != 0 {
			t.Errorf("store.memory %s: the host ended with %d", setting, code)
		}
		r = finish(t, command(t, dir, "check", "--root", "kv=1GiB", "--socket", "s", "--http-listen", "", "--store-memory", setting))
		if got := strings.Contains(r.stdout, "are the nearest level"); got != want {
			t.Errorf("store.memory %s: check tells of memory: %v, want %v: %s", setting, got, want, r.stdout)
		}
	}
}

// The log for programs has durations and enumerations as the words that the log for people has.
func TestJSONLogHasWords(t *testing.T) {
	name := filepath.Join(t.TempDir(), "log")
	f, err := os.Create(name)
	testenv.OK(t, err)
	defer f.Close()
	stderr := os.Stderr
	os.Stderr = f
	log, _ := newLog(&config.Log{Level: config.LevelInfo, Format: config.FormatJSON})
	os.Stderr = stderr
	log.Warn("a line", "after", 1480*time.Millisecond, "by", evictor.Loaded, "bytes", 7, "error", os.ErrNotExist)
	text, err := os.ReadFile(name)
	testenv.OK(t, err)
	got := map[string]any{}
	testenv.OK(t, json.Unmarshal(text, &got))
	for key, want := range map[string]any{
		"level": "WARN", "after": "1.48s", "by": evictor.Loaded.String(), "bytes": 7., "error": "file does not exist",
	} {
		if got[key] != want {
			t.Errorf("%s is %v, want %v", key, got[key], want)
		}
	}
	if _, err := time.Parse(time.RFC3339Nano, got["time"].(string)); err != nil {
		t.Error(err)
	}
}

// A host with the defaults serves in a control group of 1 GiB, and check tells of what it takes there: a part of the group's memory.
func TestDefaultsInASmallGroup(t *testing.T) {
	testenv.Need(t, testenv.MemoryCgroup)
	const limit = 1 << 30
	group, err := os.MkdirTemp(testenv.MemoryCgroups(), "kvhost-test-")
	testenv.OK(t, err)
	t.Cleanup(func() { testenv.NoError(t, os.Remove(group)) })
	name := "memory.max"
	if _, err := os.Stat(filepath.Join(group, name)); err != nil {
		name = "memory.limit_in_bytes"
	}
	inner := filepath.Join(group, "inner") // the limit is one above
	testenv.OK(t, os.Mkdir(inner, 0o755))
	t.Cleanup(func() { testenv.NoError(t, os.Remove(inner)) })
	testenv.OK(t, os.WriteFile(filepath.Join(group, name), []byte(strconv.Itoa(limit)), 0))
	dir := shortDir(t)
	in := func(args ...string) *exec.Cmd {
		cmd := command(t, dir, append([]string{"-c", `echo $$ >"$0/cgroup.procs" && exec "$@"`, inner, binary}, args...)...)
		cmd.Path, cmd.Args[0] = "/bin/sh", "/bin/sh"
		return cmd
	}
	args := []string{"--root", "kv=4GiB", "--socket", "s", "--http-listen", "", "--store-memory", "auto"}
	var facts struct {
		Facts struct {
			Machine struct {
				Memory int64 `json:"memory_bytes"`
				Group  bool  `json:"control_group"`
			} `json:"machine"`
		} `json:"facts"`
	}
	r := finish(t, in(append([]string{"check", "--json"}, args...)...))
	testenv.OK(t, json.Unmarshal([]byte(r.stdout), &facts))
	if m := facts.Facts.Machine; r.code != 0 || m.Memory != limit || !m.Group {
		t.Errorf("check: exit code %d, memory %+v, want %d of a group\n%s", r.code, m, limit, r.stderr)
	}
	_, logged, stop := startCommand(t, in(args...))
	took := regexp.MustCompile(`"memory before the roots","bytes":(\d+)`).FindStringSubmatch(logged())
	if took == nil {
		t.Fatalf("the host took no memory:\n%s", logged())
	}
	if n, err := strconv.Atoi(took[1]); err != nil || n > limit/4 || n < 128<<20 {
		t.Errorf("memory before the roots: %s bytes of %d", took[1], limit)
	}
	if code := stop(syscall.SIGTERM); code != 0 {
		t.Errorf("the host ended with %d:\n%s", code, logged())
	}
}
