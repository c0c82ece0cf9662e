package command

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"aead.dev/minisign"
	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
	"github.com/kvhost/kvhost/host/internal/policyset"
	"github.com/kvhost/kvhost/host/internal/testkit/policytest"
	"github.com/kvhost/kvhost/host/internal/testkit/wasmtest"
)

// lruFile is a first-party module as a file in a new directory.
func lruFile(t *testing.T) (dir, path string) {
	t.Helper()
	dir = t.TempDir()
	return dir, module(t, dir, "mine.wasm", "lru")
}

// want runs the command and compares its exit code and its output.
func want(t *testing.T, dir string, code int, text string, args ...string) string {
	t.Helper()
	r := finish(t, command(t, dir, args...))
	if r.code != code || !strings.Contains(r.stdout+r.stderr, text) {
		t.Errorf("kvhost %s: code %d, want %d and %q\n%s%s", strings.Join(args, " "), r.code, code, text, r.stdout,
			r.stderr)
	}
	return r.stdout
}

func TestPolicyPackChangesTheManifest(t *testing.T) {
	dir, path := lruFile(t)
	manifest := `{"name":"renamed","version":"9","abi":1,"roles":["evict"],"grants":["wasi-stub"]}`
	testenv.OK(t, os.WriteFile(filepath.Join(dir, "manifest.json"), []byte(manifest), 0o644))
	want(t, dir, exitOK, "", "policy", "pack", "mine.wasm")
	module, err := os.ReadFile(path)
	testenv.OK(t, err)
	if text, ok, err := abi.CustomSection(module, abi.ManifestSection); string(text) != manifest || !ok || err != nil {
		t.Errorf("packed manifest: got %q, %v, %v", text, ok, err)
	}
	want(t, dir, exitOK, "renamed", "policy", "inspect", "mine.wasm")
	testenv.OK(t, os.WriteFile(filepath.Join(dir, "bad.json"), []byte(`{"name":"x","abi":2}`), 0o644))
	want(t, dir, exitFailure, "made for ABI 2", "policy", "pack", "mine.wasm", "--manifest", "bad.json")
	want(t, dir, exitUsage, "want one .wasm file", "policy", "pack")
}

func TestPolicyInspect(t *testing.T) {
	dir, path := lruFile(t)
	public, secret, err := minisign.GenerateKey(rand.Reader)
	testenv.OK(t, err)
	module, err := os.ReadFile(path)
	testenv.OK(t, err)
	key := public.String()
	want(t, dir, exitPolicy, "signature", "policy", "inspect", "--public-key", key, path)
	testenv.OK(t, os.WriteFile(path+".minisig", minisign.Sign(secret, module), 0o600))
	want(t, dir, exitOK, "evict", "policy", "inspect", "--public-key", key, path)
	var got inspection
	if err := json.Unmarshal([]byte(want(t, dir, exitOK, "", "policy", "inspect", "--json", "mine.wasm")),
		&got); err != nil {
		t.Fatal(err)
	}
	if fmt.Sprint(got.Roles) != "[evict]" || got.Fuel.Call == 0 || len(got.Imports) == 0 {
		t.Errorf("lru: want its role, fuel and imports, got %+v", got)
	}
	want(t, dir, exitOK, got.Digest, "policy", "inspect", "lru") // the embedded one, uncompressed
	testenv.OK(t, os.WriteFile(path, append(module, 0, 2, 1, 'x'), 0o600))
	want(t, dir, exitPolicy, "did not sign these bytes", "policy", "inspect", "--public-key", key, path)
}

func TestPolicyCheck(t *testing.T) {
	dir, path := lruFile(t)
	want(t, dir, exitOK, "ok: evict;", "policy", "check", "--slots", "4096", "mine.wasm")
	want(t, dir, exitOK, `"Findings":null`, "policy", "check", "--slots", "4096", "--json", "mine.wasm")
	want(t, dir, exitUsage, "want key=value", "policy", "check", "--set", "x", "mine.wasm")
	want(t, dir, exitPolicy, `has no setting "x"`, "policy", "check", "--set", "x=1", "mine.wasm")
	testenv.OK(t, os.Truncate(path, 1000))
	want(t, dir, exitPolicy, "mine.wasm: module: a host refuses it", "policy", "check", "mine.wasm")
	want(t, dir, exitUsage, "unknown command", "policy", "nonsense")
}

// fuelTaken is how the check says what the most expensive call took.
var fuelTaken = regexp.MustCompile(`, (\d+) % of its fuel`)

// A new project builds with its own Makefile, in every language and role, passes the check unchanged, and keeps the guide's rules: below half of
// the fuel, and no more memory than it needs.
func TestPolicyNew(t *testing.T) {
	tools := map[string][]*testenv.Tool{
		"go": {testenv.Make}, "c": {testenv.Make, testenv.Clang}, "rust": {testenv.Make, testenv.Cargo},
	}
	for kind := range 4 * len(policyLanguages) {
		language, role := policyLanguages[kind/4], slices.Sorted(maps.Keys(beginnings))[kind%4]
		t.Run(language+" "+role, func(t *testing.T) {
			t.Parallel()
			testenv.Need(t, tools[language]...)
			dir := t.TempDir()
			want(t, dir, exitOK, "make -C my-own check", "policy", "new", "--lang", language, "--role", role, "my-own")
			cmd := exec.Command("make", "-C", "my-own", "check", "KVHOST="+filepath.Base(binary)) // by PATH: make takes no name with a blank
			cmd.Dir = dir
			cmd.Env = append(os.Environ(), "PATH="+filepath.Dir(binary)+":"+os.Getenv("PATH"), "GOFLAGS=-mod=mod", "GOPROXY=off", "CARGO_NET_OFFLINE=true")
			out, err := cmd.CombinedOutput()
			if err != nil || !strings.Contains(string(out), "my-own.wasm: ok: "+role+";") {
				t.Fatalf("make check: %v\n%s", err, out)
			}
			if fuel := fuelTaken.FindStringSubmatch(string(out)); fuel == nil || len(fuel[1]) > 2 || fuel[1] >= "50" && len(fuel[1]) == 2 {
				t.Errorf("want below half of the fuel:\n%s", out)
			}
			if role != "evict" {
				want(t, dir, exitOK, "at most 16.0 MiB", "policy", "inspect", "my-own/my-own.wasm")
			}
			want(t, dir, exitUsage, "not empty", "policy", "new", "--lang", language, "my-own")
		})
	}
	want(t, t.TempDir(), exitUsage, "unknown language", "policy", "new", "--lang", "perl", "mine")
	want(t, t.TempDir(), exitUsage, "unknown role", "policy", "new", "--role", "run", "mine")
	want(t, t.TempDir(), exitUsage, "bad name", "policy", "new", "Not-A-Name")
	want(t, t.TempDir(), exitUsage, "bad name", "policy", "new", "a-")
}

// shownCall is a line of the file of kvhost sim --calls.
type shownCall struct {
	Events []struct {
		Op                  string
		Slot, Parent, Depth uint32
		Key, Request        uint64
	}
	Ask        *abi.Ask
	Victims    []uint32
	Candidates []abi.Candidate
	Admitted   []bool
	Roots      []abi.RootFacts
	Root       uint32
	Path, Err  string
	Fuel       uint64
	Msg, Text  string // of a line that the module logged
}

// Three requests over a root of two chunks, by hand, and a real trace, by what the simulation counts.
func TestSimCalls(t *testing.T) {
	dir := t.TempDir()
	text := ""
	for i, ids := range []string{"5,6", "5", "7"} {
		text += fmt.Sprintf(`{"timestamp":%d,"input_length":9,"output_length":1,"hash_ids":[%s]}`+"\n", 1000*i, ids)
	}
	testenv.OK(t, os.WriteFile(filepath.Join(dir, "t.jsonl"), []byte(text), 0o600))
	calls := func(code int, wanted string, args ...string) (list []shownCall) {
		t.Helper()
		want(t, dir, code, wanted, append([]string{"sim", "--quiet", "--trace", "t.jsonl", "--calls", "calls"}, args...)...)
		file, err := os.Open(filepath.Join(dir, "calls"))
		testenv.OK(t, err)
		defer file.Close()
		for d := json.NewDecoder(file); d.More(); {
			var c shownCall
			testenv.OK(t, d.Decode(&c))
			if c.Fuel > 0 || c.Err != "" || c.Msg == sandbox.LogMessage { // else it is a line of the simulator's own log
				list = append(list, c)
			}
		}
		return list
	}
	evict := func(code int, policy string) []shownCall {
		return calls(code, "", "--capacity", "2", "--policy", policy)
	}
	got := evict(exitOK, "lru.wasm")
	ops := ""
	for _, c := range got {
		for _, e := range c.Events {
			ops += fmt.Sprintf("%s %d %d %d; ", e.Op, int32(e.Slot), e.Key, e.Request)
		}
		ops += fmt.Sprintln(c.Ask != nil, c.Victims)
	}
	if wanted := "insert 0 5 1; insert 1 6 1; request_end -1 0 1; touch 0 5 2; request_end -1 0 2; true [1]\n" +
		"remove 1 6 3; insert 1 7 3; request_end -1 0 3; false []\n"; ops != wanted {
		t.Errorf("lru: want\n%sgot\n%s", wanted, ops)
	}
	if got := evict(exitOK, "fifo.wasm"); len(got) == 0 || !slices.Equal(got[0].Victims, []uint32{0}) {
		t.Errorf("fifo: want slot 0 as the first victim, got %+v", got)
	}
	a := wasmtest.Assembly{Pages: 200}.Importing(abi.ImportModule, abi.ImportLog, "iii>").With(abi.ExportMarker, ">").
		With(abi.ExportBuffer, "ii>i", []byte{0x20, 0}, wasmtest.I32(21), []byte{0x74}, wasmtest.I32(4096), []byte{0x6a}).With(abi.ExportInit, "i>i", wasmtest.I32(0)).
		With(abi.ExportEvents, "ii>i", wasmtest.I32(0)).
		With(abi.ExportStep, "ii>I", wasmtest.I32(2), wasmtest.I32(4096), wasmtest.I32(3), wasmtest.Call(0), wasmtest.Packed(abi.StatusDefault, 0))
	testenv.OK(t, os.WriteFile(filepath.Join(dir, "a.wasm"), a.Bytes(), 0o600))
	if got := evict(exitOK, "a.wasm"); !slices.ContainsFunc(got, func(c shownCall) bool { return c.Msg == sandbox.LogMessage }) ||
		!slices.ContainsFunc(got, func(c shownCall) bool { return c.Ask != nil && c.Victims == nil }) {
		t.Errorf("a module that logs and names no victim: want both, got %+v", got)
	}
	a = a.With(abi.ExportStep, "ii>I", wasmtest.Packed(abi.StatusInternal, 0))
	testenv.OK(t, os.WriteFile(filepath.Join(dir, "b.wasm"), a.Bytes(), 0o600))
	evict(exitPolicy, "b.wasm")
	levels := func(policy string) []shownCall {
		return calls(exitOK, "", "--policy", "lru.wasm", "--level", "0=1,1=2", "--cost", "0=2,1=1", "--admit", policy)
	}
	if got := levels("reuse.wasm"); len(got) == 0 || !slices.Equal(got[0].Admitted, []bool{true}) || got[0].Candidates[0].Key != 5 {
		t.Errorf("reuse: want chunk 5 admitted first, got %+v", got)
	}
	if got := levels("llmd.wasm"); len(got) == 0 || !strings.HasPrefix(got[0].Path, "t_") || got[0].Root != abi.None || len(got[0].Roots) != 2 {
		t.Errorf("llmd: want a path and none of the two roots, got %+v", got)
	}
	calls(exitUsage, "--calls wants one trace", "--policy", "lru.wasm")
	trace := []string{"sim", "--quiet", "--json", "--trace", simTrace(t), "--policy", "lru.wasm", "--capacity", "5%", "--calls", "calls"}
	var rows []struct{ Hits, Evictions int }
	testenv.OK(t, json.Unmarshal([]byte(want(t, dir, exitOK, "", trace...)), &rows))
	file, err := os.ReadFile(filepath.Join(dir, "calls"))
	testenv.OK(t, err)
	for op, n := range map[string]int{"touch": rows[0].Hits, "remove": rows[0].Evictions} {
		if got := strings.Count(string(file), fmt.Sprintf(`{"Op":%q`, op)); got != n {
			t.Errorf("events of %s: want what the simulation counts, %d, got %d", op, n, got)
		}
	}
}

// What an example's author sees: where a chunk goes, and how full the roots were said to be.
func TestSimCallsOfAnExample(t *testing.T) {
	dir := t.TempDir()
	text := `{"timestamp":0,"input_length":9,"hash_ids":[5,6]}` + "\n" + `{"timestamp":2000,"input_length":9,"hash_ids":[5,7]}` + "\n"
	testenv.OK(t, os.WriteFile(filepath.Join(dir, "t.jsonl"), []byte(text), 0o600))
	want(t, dir, exitOK, "", "sim", "--trace", "t.jsonl", "--level", "0=3,1=2", "--cost", "0=5,1=1", "--policy", "lru.wasm", "--calls", "calls",
		"--admit", policytest.Example(t, "spill")+":room_percent=100")
	file, err := os.Open(filepath.Join(dir, "calls"))
	testenv.OK(t, err)
	defer file.Close()
	got := ""
	for d := json.NewDecoder(file); d.More(); {
		var c shownCall
		if testenv.OK(t, d.Decode(&c)); len(c.Candidates) == 0 {
			continue
		}
		free := func(i int) uint64 { return 100 * c.Roots[i].Free / c.Roots[i].Capacity }
		got += fmt.Sprintf("chunk %d of request %d: %d and %d free, to %d, %.3s\n", c.Candidates[0].Key, c.Candidates[0].Request, free(0), free(1), c.Root, c.Path)
	}
	wanted := "chunk 5 of request 1: 100 and 100 free, to 0, r0/\nchunk 6 of request 1: 100 and 100 free, to 0, r0/\n" +
		"chunk 7 of request 2: 33 and 100 free, to 1, r0/\n"
	if got != wanted {
		t.Errorf("spill: want\n%sgot\n%s", wanted, got)
	}
}

// compileBomb is an evict policy that takes long to compile: nested blocks, to the square of their number.
func compileBomb() string {
	leb := func(n int) []byte {
		return []byte{byte(n) | 0x80, byte(n>>7) | 0x80, byte(n>>14) | 0x80, byte(n >> 21)}
	}
	sized := func(b ...[]byte) []byte {
		all := slices.Concat(b...)
		return append(leb(len(all)), all...)
	}
	export := func(name string, kind, index byte) []byte {
		return append(append([]byte{byte(len(name))}, name...), kind, index)
	}
	const depth, i32, i64 = 5_000, 0x7f, 0x7e
	bomb := sized([]byte{0}, bytes.Repeat([]byte{0x03, 0x40}, depth), bytes.Repeat([]byte{0x0b}, depth),
		[]byte{0x42, 0, 0x0b})
	never := make([]byte, 16) // compiled before, in any test's cache
	_, _ = rand.Read(never)
	return string(slices.Concat([]byte("\x00asm\x01\x00\x00\x00"), []byte{0}, sized([]byte{1, 'x'}, never),
		[]byte{1}, sized([]byte{4, 0x60, 0, 0, 0x60, 2, i32, i32, 1, i32, 0x60, 1, i32, 1, i32, 0x60, 2, i32, i32, 1, i64}),
		[]byte{3}, sized([]byte{4, 0, 1, 2, 3}), []byte{5, 3, 1, 0, 1},
		[]byte{7}, sized([]byte{6}, export("memory", 2, 0), export("kvhost_abi_1", 0, 0), export("kv_buffer", 0, 1),
			export("kv_init", 0, 2), export("kv_events", 0, 1), export("kv_step", 0, 3)),
		[]byte{10}, sized([]byte{4, 2, 0, 0x0b, 4, 0, 0x41, 0, 0x0b, 4, 0, 0x41, 0, 0x0b}, bomb)))
}

const compiling = `"msg":"compiling policy","policy":"bomb"`

// A host that compiles a bomb at its start ends at a signal, without blaming the module.
func TestStopWhileCompiling(t *testing.T) {
	dir := shortDir(t)
	write(t, dir, "bomb.wasm", compileBomb())
	logged, ended, stop := launch(t, command(t, dir, "--policy", "bomb.wasm", "--http-listen", ""))
	await(t, logged, compiling, ended)
	if code := stop(syscall.SIGTERM); code != exitOK || !strings.Contains(logged(), "stopped while starting") {
		t.Errorf("exit code %d\n%s", code, logged())
	}
}

// While a swap compiles a bomb, others are made, and a signal ends the host. What the bomb used too much of is named.
func TestSwapWhileCompiling(t *testing.T) {
	dir := shortDir(t)
	write(t, dir, "bomb.wasm", compileBomb())
	write(t, dir, "kvhost.toml", `
[http]
listen = ""
[[policy]]
name = "main"
module = "lru"
`)
	_, logged, stop := startHost(t, dir, "--config", "kvhost.toml")
	bad := command(t, dir, "policy", "swap", "--unchecked", "main", "bomb.wasm")
	testenv.OK(t, bad.Start())
	refused := make(chan error, 1)
	go func() { refused <- bad.Wait() }()
	await(t, logged, compiling, nil)
	if r := finish(t, command(t, dir, "policy", "swap", "main", "lru")); r.code != exitOK {
		t.Errorf("another swap: %d\n%s", r.code, r.stderr)
	}
	select {
	case err := <-refused:
		t.Fatalf("the first swap ended before: %v\n%s", err, logged())
	default:
	}
	if code := stop(syscall.SIGTERM); code != exitOK {
		t.Errorf("exit code %d\n%s", code, logged())
	}
	if <-refused == nil {
		t.Error("the bomb was swapped in")
	}
}

// A service manager tries again when the compiler was killed, and not when the module is to blame.
func TestExitCodeOfCompiler(t *testing.T) {
	for err, want := range map[error]int{sandbox.ErrCompiler: exitFailure, sandbox.ErrLimit: exitPolicy} {
		if code := exitCode(fmt.Errorf("%w: x: %w", policyset.ErrPolicy, err)); code != want {
			t.Errorf("%v: exit code %d, want %d", err, code, want)
		}
	}
}
