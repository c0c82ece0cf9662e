package command

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/testkit/policytest"
	"github.com/kvhost/kvhost/host/internal/testkit/wasmtest"
)

// module copies a first-party policy to a file.
func module(t *testing.T, dir, name, policy string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(policytest.Dir(t, policy), policy+".wasm"))
	testenv.OK(t, err)
	return write(t, dir, name, string(b))
}

// TestLivePolicies changes the policies of a running host in every possible way, while a client stores, loads and
// compares.
func TestLivePolicies(t *testing.T) {
	t.Parallel() // it waits more than it works
	dir := testenv.Dir(t)
	module(t, dir, "main.wasm", "lru")
	fifo := module(t, dir, "second.wasm", "fifo")
	bad := write(t, dir, "bad.wasm", "not wasm at all")
	file := write(t, dir, "kvhost.toml", `
[http]
listen = "`+anyPort+`"
[[root]]
path = "kv"
capacity = "4MiB"
evict = "main"
[[policy]]
name = "main"
module = "./main.wasm"
[[policy]]
name = "names"
module = "fanout"
[[policy]]
name = "other names"
module = "fanout"
namespaces = ["somebody-else/*"]
config = {widths = "4/4"}
[[policy]]
name = "trial"
module = "s3fifo"
shadow = true
`)
	cmd, logged, stop := startHost(t, dir, "--config", file)
	client := command(t, dir, "replay", "--trace", absolute(t, mixedTrace), "--sessions", "2", "--chunk-bytes", "8192",
		"--limit", "800", "--json")
	var report, complaints bytes.Buffer
	client.Stdout, client.Stderr = &report, &complaints
	testenv.OK(t, client.Start())
	policy := func(args ...string) result { return finish(t, command(t, dir, append([]string{"policy"}, args...)...)) }
	list := func(want ...string) {
		t.Helper()
		r := policy("list")
		for line := range strings.Lines(r.stdout) {
			found := 0
			for _, w := range want {
				if strings.Contains(strings.Join(strings.Fields(line), " "), w) {
					found++
				}
			}
			if found == len(want) {
				return
			}
		}
		t.Errorf("no line with %q in (%d)\n%s%s", want, r.code, r.stdout, r.stderr)
	}
	list("main evict acting lru", "kv")
	var listed struct {
		Policies []struct{ Name, Role, State, Module, Digest string }
	}
	text := policy("list", "--json")
	if err := json.Unmarshal([]byte(text.stdout), &listed); err != nil || len(listed.Policies) < 4 || !slices.ContainsFunc(
		listed.Policies, func(p struct{ Name, Role, State, Module, Digest string }) bool {
			return p.Name == "main" && p.Role == "evict" && p.State == "acting" && p.Module == "lru" && len(p.Digest) == 64
		}) {
		t.Errorf("list of policies: %v: %+v, want lru acting as main", err, text)
	}
	list("other names place acting fanout")
	list("trial evict shadow s3fifo", "imaginary 4MiB")

	if r := policy("swap", "main", fifo); r.code != exitOK || !strings.Contains(r.stdout, "main is fifo") {
		t.Errorf("swap: %+v", r)
	}
	list("main evict acting fifo")
	if r := policy("swap", "names", "--set", "widths=1/1/1"); r.code != exitOK ||
		!strings.Contains(r.stdout, "place: replaced") {
		t.Errorf("swap of a place policy: %+v", r)
	}
	if r := policy("swap", "names", "--set", "widths=2/1"); r.code != exitOK {
		t.Errorf("second swap of a place policy: %+v", r)
	}
	wrong := strings.Repeat("ab", 32)
	r := policy("swap", "main", fifo, "--sha256", wrong)
	if r.code == exitOK || !strings.Contains(r.stderr, wrong) || strings.Count(r.stderr, "SHA-256") != 1 ||
		len(longestHex(r.stderr)) != 64 {
		t.Errorf("swap for a module with another digest: %+v", r)
	}
	for what, args := range map[string][]string{
		"a bad module": {"swap", "main", bad}, "no such policy": {"swap", "nobody", fifo},
		"another role": {"swap", "names", fifo},
		"no shadow":    {"promote", "main"}, "an unknown setting": {"swap", "main", "--set", "nonsense=1"},
	} {
		if r := policy(args...); r.code != exitPolicy || r.stderr == "" {
			t.Errorf("swap with %s: got %+v, want a refusal", what, r)
		}
	}
	list("main evict acting fifo")

	module(t, dir, "next.wasm", "s3fifo")
	testenv.OK(t, os.Rename(filepath.Join(dir, "next.wasm"), filepath.Join(dir, "main.wasm")))
	cmd.Process.Signal(syscall.SIGHUP)
	await(t, logged, `"msg":"configuration reloaded"`, nil)
	list("main evict acting s3fifo")

	if r := policy("promote", "trial"); r.code != exitOK || !strings.Contains(r.stdout, "trial is s3fifo") {
		t.Errorf("promote: %+v", r)
	}
	list("trial evict acting s3fifo", "kv")

	if err := client.Wait(); err != nil {
		t.Fatalf("the client failed: %v\n%s", err, complaints.String())
	}
	var sum struct {
		Requests, Hits  int64
		FailedLoads     int64  `json:"failed_loads"`
		FailedStores    int64  `json:"failed_stores"`
		MismatchedBytes *int64 `json:"mismatched_bytes"`
	}
	if err := json.Unmarshal(report.Bytes(), &sum); err != nil || sum.Requests != 800 || sum.Hits == 0 ||
		sum.FailedLoads+sum.FailedStores != 0 || sum.MismatchedBytes == nil || *sum.MismatchedBytes != 0 {
		t.Errorf("the client: %v\n%s", err, report.String())
	}
	if code := stop(syscall.SIGTERM); code != exitOK {
		t.Errorf("exit code %d\n%s", code, logged())
	}
	if strings.Contains(logged(), "panic") {
		t.Error(logged())
	}
	_, logged, stop = startHost(t, dir, "--config", file) // what a command changed is gone, what it named is not
	list("main evict acting s3fifo")
	list("names place acting fanout")
	if code := stop(syscall.SIGTERM); code != exitOK {
		t.Errorf("exit code %d\n%s", code, logged())
	}
}

// longestHex is the longest run of hexadecimal digits.
func longestHex(text string) (longest string) {
	for _, run := range strings.FieldsFunc(text, func(r rune) bool {
		return !strings.ContainsRune("0123456789abcdef",
			r)
	}) {
		if len(run) > len(longest) {
			longest = run
		}
	}
	return longest
}

// A module that the host would take, and in which policy check finds something, is not swapped in unless that is asked for.
func TestSwapIsJudged(t *testing.T) {
	t.Parallel()
	dir := testenv.Dir(t)
	all := wasmtest.Modules()
	i := slices.IndexFunc(all, func(m wasmtest.Module) bool { return m.Name == "later the same slot always" })
	testenv.OK(t, os.WriteFile(filepath.Join(dir, "bad.wasm"), all[i].Wasm, 0o600))
	startHost(t, dir, "--policy", "lru", "--root", "kv=4MiB", "--root", "kv2=4MiB", "--socket", "s", "--http-listen", "")
	swap := func(more ...string) result {
		return finish(t, command(t, dir, append([]string{"policy", "swap", "--socket", "s", "lru", "bad.wasm"}, more...)...))
	}
	if r := swap(); r.code != exitPolicy || !strings.Contains(r.stderr, "bad.wasm: ") || !strings.Contains(r.stderr, "--unchecked") {
		t.Errorf("swap of a module with findings: %+v, want exit code %d and a finding", r, exitPolicy)
	}
	if r := swap("--unchecked"); r.code != exitOK || strings.Contains(r.stdout, "checked") {
		t.Errorf("unchecked swap: %+v, want it to be made", r)
	}
	testenv.OK(t, os.WriteFile(filepath.Join(dir, "elf.wasm"), []byte("\x7fELF"), 0o600))
	r := finish(t, command(t, dir, "policy", "swap", "--socket", "s", "lru", "elf.wasm"))
	if r.code != exitPolicy || !strings.Contains(r.stderr, "WebAssembly") || strings.Contains(r.stderr, "--unchecked") {
		t.Errorf("swap of what is no module: %+v, want its reason, and not --unchecked, which does not help", r)
	}
	r = finish(t, command(t, dir, "policy", "swap", "--socket", "s", "lur", "lru"))
	if r.code != exitPolicy || r.stdout != "" || !strings.Contains(r.stderr, `no policy "lur" is active; did you mean "lru"?`) {
		t.Errorf("swap of a policy that is not there: %+v, want exit code %d before anything is checked", r, exitPolicy)
	}
	r = finish(t, command(t, dir, "__complete", "policy", "swap", "--socket", "s", ""))
	if strings.Count(r.stdout, "lru\tevict, ") != 1 || !strings.Contains(r.stdout, "fanout\tplace, ") {
		t.Errorf("completion of live policies: %+v, want lru, which two roots have, once, and fanout", r)
	}
	r = finish(t, command(t, dir, "policy", "swap", "--socket", "s", "lru", "lru"))
	if r.code != exitOK || !strings.Contains(r.stdout, "lru: checked, no findings") {
		t.Errorf("swap of a sound module: %+v, want it checked and made", r)
	}
	r = finish(t, command(t, dir, "policy", "swap", "--socket", "none", "lru", "lru"))
	if r.code != exitFailure || r.stdout != "" || !strings.Contains(r.stderr, "no host is running") {
		t.Errorf("swap without a host: %+v, want exit code %d before anything is checked", r, exitFailure)
	}
}
