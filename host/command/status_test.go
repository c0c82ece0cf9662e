package command

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
)

// Without a socket, the status is that of the only host of this user, as of one that an engine has started. Of several, it is of none.
func TestStatusFindsTheHost(t *testing.T) {
	dir := shortDir(t)
	own := filepath.Join(dir, fmt.Sprintf("kvhost-%d", os.Geteuid()))
	testenv.OK(t, os.Mkdir(own, 0o700))
	ask := func() result {
		cmd := command(t, dir, "status", "--json")
		cmd.Env = append(cmd.Env, "XDG_RUNTIME_DIR="+dir)
		return finish(t, cmd)
	}
	first, second := filepath.Join(own, "a.sock"), filepath.Join(own, "b.sock")
	startHost(t, dir, "--root", "kv=64MiB", "--socket", first, "--http-listen", "")
	services, _ := filepath.Glob("/run/kvhost*/kvhost.sock") // of this machine's own, there is not one host alone
	if r := ask(); len(services) == 0 && (r.code != exitOK || !strings.Contains(r.stdout, `"kv"`) && !strings.Contains(r.stdout, "/kv\"") || !strings.Contains(r.stderr, first)) {
		t.Errorf("status with one host: %+v, want that of %s, named", r, first)
	}
	startHost(t, dir, "--root", "kv2=64MiB", "--socket", second, "--http-listen", "")
	if r := ask(); r.code != exitFailure || !strings.Contains(r.stderr, "--socket") || !strings.Contains(r.stderr, first+", "+second) {
		t.Errorf("status with two hosts: %+v, want exit code %d and both sockets", r, exitFailure)
	}
	if r := finish(t, command(t, dir, "reload")); r.code != exitFailure || !strings.Contains(r.stderr, "no host is running") {
		t.Errorf("reload without a socket: %+v, want that it looks for no other host", r)
	}
}

// TestStatus asks a real host for its status, as text and as JSON, and after it has ended.
func TestStatus(t *testing.T) {
	dir := shortDir(t)
	_, _, stop := startHost(t, dir, "--policy", "lru.wasm", "--http-listen", "")
	r := finish(t, command(t, dir, "status"))
	for _, want := range []string{"ready", "hit ratio -", "kvhost-data", "in service", "lru", "acting", "store_published"} {
		if r.code != exitOK || !strings.Contains(r.stdout, want) {
			t.Errorf("exit code %d, no %q:\n%s%s", r.code, want, r.stdout, r.stderr)
		}
	}
	r = finish(t, command(t, dir, "status", "--json"))
	var st struct {
		Serving bool
		Roots   []struct {
			Path     string
			State    string
			Capacity int64
		}
	}
	if err := json.Unmarshal([]byte(r.stdout), &st); err != nil || !st.Serving || len(st.Roots) != 1 ||
		filepath.Base(st.Roots[0].Path) != "kvhost-data" || st.Roots[0].State != "in_service" || st.Roots[0].Capacity == 0 {
		t.Errorf("status --json: %v, want one root in service: %s%s", err, r.stdout, r.stderr)
	}
	if code := stop(os.Interrupt); code != exitOK {
		t.Errorf("exit code %d", code)
	}
	for _, flag := range []string{"--json", "--watch"} {
		if r := finish(t, command(t, dir, "status", flag, "--socket", "kvhost.sock")); r.code != exitFailure || !strings.Contains(r.stderr, "no host is running") {
			t.Errorf("status %s without a host: exit code %d, %s", flag, r.code, r.stderr)
		}
	}
}
