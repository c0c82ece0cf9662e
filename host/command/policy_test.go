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
	"strconv"
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

// Three requests over a root of two chunks, by hand, and a real trace, by what the simulation counts.
func TestPolicyStep(t *testing.T) {
	dir := t.TempDir()
	text := ""
	for i, ids := range []string{"5,6", "5", "7"} {
		text += fmt.Sprintf(`{"timestamp":%d,"input_length":9,"output_length":1,"hash_ids":[%s]}`+"\n", 1000*i, ids)
	}
	testenv.OK(t, os.WriteFile(filepath.Join(dir, "t.jsonl"), []byte(text), 0o600))
	step := func(code int, wanted string, args ...string) string {
		return want(t, dir, code, wanted, append([]string{"policy", "step", "--trace", "t.jsonl", "--capacity", "2"}, args...)...)
	}
	got := step(exitOK, "", "lru.wasm")
	for _, line := range []string{
		"  insert slot 0, chunk 5, depth 0, request 1\n  insert slot 1, chunk 6, depth 1 after slot 0, request 1\n  request_end\n  touch slot 0",
		"#1 request 2 at 1s: victim slot 1, chunk 6, depth 1 after slot 0, request 1, 0 uses; 2 resident, 1 hits, 2 misses, 0 evicted; ",
	} {
		if !strings.Contains(got, line) {
			t.Errorf("want %q, got\n%s", line, got)
		}
	}
	if got := step(exitOK, "#1 ", "--only", "evict", "fifo.wasm"); !strings.Contains(got, "victim slot 0") || strings.Contains(got, "insert") {
		t.Errorf("fifo, only evict: want slot 0 and no events, got\n%s", got)
	}
	a := wasmtest.Assembly{Pages: 200}.Importing(abi.ImportModule, abi.ImportLog, "iii>").With(abi.ExportMarker, ">").
		With(abi.ExportBuffer, "ii>i", []byte{0x20, 0}, wasmtest.I32(21), []byte{0x74}, wasmtest.I32(4096), []byte{0x6a}).With(abi.ExportInit, "i>i", wasmtest.I32(0)).
		With(abi.ExportEvents, "ii>i", wasmtest.I32(0)).
		With(abi.ExportStep, "ii>I", wasmtest.I32(2), wasmtest.I32(4096), wasmtest.I32(3), wasmtest.Call(0), wasmtest.Packed(abi.StatusDefault, 0))
	testenv.OK(t, os.WriteFile(filepath.Join(dir, "a.wasm"), a.Bytes(), 0o600))
	if got := step(exitOK, "names none", "a.wasm"); !strings.Contains(got, "  log: WARN: ") {
		t.Errorf("a module that logs: want the line, got\n%s", got)
	}
	both := a.With(abi.ExportLayout, "ii>I", wasmtest.Packed(abi.StatusDefault, 0)).Bytes()
	testenv.OK(t, os.WriteFile(filepath.Join(dir, "both.wasm"), both, 0o600))
	step(exitOK, "names none", "both.wasm")
	step(exitOK, "#1 Llama-3.1-8B, 32 x 64 KiB pages: 32 segments", "--only", "layout", "both.wasm")
	a = a.With(abi.ExportStep, "ii>I", wasmtest.Packed(abi.StatusInternal, 0))
	testenv.OK(t, os.WriteFile(filepath.Join(dir, "b.wasm"), a.Bytes(), 0o600))
	step(exitPolicy, "", "b.wasm")
	step(exitOK, `"admitted":true`, "--level", "0=1,1=2", "--cost", "0=2,1=1", "--until", "1", "--json", "reuse.wasm")
	step(exitPolicy, "does not evict or layout; with --level", "fanout.wasm")
	step(exitOK, "to the emptiest, path t_", "--level", "0=1,1=2", "--cost", "0=2,1=1", "--until", "1", "--only", "place,layout", "llmd.wasm")
	step(exitUsage, "want events, evict, admit, place, layout or log", "--only", "all", "lru.wasm")
	step(exitUsage, "want a share", "--capacity", "0%", "lru.wasm")
	if got := step(exitOK, "", "--profile", "--only", "log", "lru.wasm"); !strings.Contains(got, "\nkv_step: ") ||
		!strings.Contains(got, "slotlist.__List_.Victims\n") {
		t.Errorf("a profile: want kv_step and its functions, got\n%s", got)
	}
	cmd := command(t, dir, "policy", "step", "--trace", simTrace(t), "--capacity", "9", "--only", "evict", "lru.wasm")
	m := onTerminal(t, cmd)
	for _, keys := range []struct{ wait, press string }{{"#1 ", "\n"}, {"#2 ", "2\n"}, {"#4 ", "q\n"}} {
		m.await(t, keys.wait, func(drawn string) bool { return strings.Contains(drawn, keys.wait) })
		_, err := m.screen.WriteString(keys.press)
		testenv.OK(t, err)
	}
	<-m.ended
	if err := cmd.Wait(); err != nil || strings.Contains(m.text(), "#5 ") {
		t.Errorf("Enter, two more and q: want four decisions and success, got %v and %q", err, m.text())
	}
	trace := []string{"--trace", simTrace(t), "--capacity", "5%", "--json"}
	var rows []struct{ Hits, Evictions int }
	testenv.OK(t, json.Unmarshal([]byte(want(t, dir, exitOK, "", append([]string{"sim", "--policy", "lru.wasm"}, trace...)...)), &rows))
	lines := strings.Split(strings.TrimSpace(want(t, dir, exitOK, "", append([]string{"policy", "step", "--from", strconv.Itoa(rows[0].Evictions), "lru.wasm"}, trace...)...)), "\n")
	var last stepCall
	testenv.OK(t, json.Unmarshal([]byte(lines[len(lines)-1]), &last))
	if last.Hits != rows[0].Hits || last.Evicted != rows[0].Evictions || last.Decision != uint64(rows[0].Evictions) {
		t.Errorf("at the end: want what the simulation counts, %+v, got %d hits, %d evicted, decision %d", rows[0], last.Hits, last.Evicted, last.Decision)
	}
}

// What the examples' authors see: where a chunk goes and how full the roots were said to be, and how pages are laid out.
func TestPolicyStepOfExamples(t *testing.T) {
	dir := t.TempDir()
	text := `{"timestamp":0,"input_length":9,"hash_ids":[5,6]}` + "\n" + `{"timestamp":2000,"input_length":9,"hash_ids":[5,7]}` + "\n"
	testenv.OK(t, os.WriteFile(filepath.Join(dir, "t.jsonl"), []byte(text), 0o600))
	spill := policytest.Example(t, "spill") + ":room_percent=100"
	got := want(t, dir, exitOK, "", "policy", "step", "--trace", "t.jsonl", "--level", "0=3,1=2", "--cost", "0=5,1=1", spill)
	for _, line := range []string{
		"#2 request 1 at 13.421772ms: new, chunk 6, depth 1, request 1: root 0 is 0 % full, root 1 is 0 % full, to root 0, path r0/",
		"#3 request 2 at 2.013421772s: new, chunk 7, depth 1, request 2: root 0 is 67 % full, root 1 is 0 % full, to root 1, path r0/",
	} {
		if !strings.Contains(got, line) || strings.Contains(got, "#4 ") {
			t.Errorf("spill: want three decisions and %q, got\n%s", line, got)
		}
	}
	aligned := policytest.Example(t, "aligned")
	got = want(t, dir, exitOK, "", "policy", "step", "--only", "layout", aligned)
	for _, line := range []string{"#2 MLA, 61 x 18,432 B pages: 976 segments; ", "\n  plane 1, blocks from 0: 1, bytes of each page from 0: 18432, gap 0\n", "#3 "} {
		if !strings.Contains(got, line) {
			t.Errorf("aligned: want %q, got\n%s", line, got)
		}
	}
	var call stepCall
	testenv.OK(t, json.Unmarshal([]byte(want(t, dir, exitOK, "", "policy", "step", "--until", "1", "--json", aligned)), &call))
	if n := len(call.Segments); n != 512 || call.Segments[511] != [6]uint32{31, 15, 1, 0, 64 << 10, 0} {
		t.Errorf("aligned, JSON: got %d segments, the last %v; want 512, the last of plane 31 and block 15", n, call.Segments[max(0, n-1):])
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
