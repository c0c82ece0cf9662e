package command

import (
	"crypto/rand"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"aead.dev/minisign"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
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

// A new project builds with its own Makefile, in every language and role, and passes the check unchanged.
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
			want(t, dir, exitOK, "make -C mine check", "policy", "new", "--lang", language, "--role", role, "mine")
			cmd := exec.Command("make", "-C", "mine", "check", "KVHOST="+filepath.Base(binary)) // by PATH: make takes no name with a blank
			cmd.Dir = dir
			cmd.Env = append(os.Environ(), "PATH="+filepath.Dir(binary)+":"+os.Getenv("PATH"), "GOFLAGS=-mod=mod", "GOPROXY=off", "CARGO_NET_OFFLINE=true")
			out, err := cmd.CombinedOutput()
			if err != nil || !strings.Contains(string(out), "mine.wasm: ok: "+role+";") {
				t.Errorf("make check: %v\n%s", err, out)
			}
			want(t, dir, exitUsage, "not empty", "policy", "new", "--lang", language, "mine")
		})
	}
	want(t, t.TempDir(), exitUsage, "unknown language", "policy", "new", "--lang", "perl", "mine")
	want(t, t.TempDir(), exitUsage, "unknown role", "policy", "new", "--role", "run", "mine")
	want(t, t.TempDir(), exitUsage, "bad name", "policy", "new", "Not-A-Name")
}
