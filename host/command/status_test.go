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

// Without a socket, the status is that of the only host which this user may ask, wherever its socket is. Of several, it is of none, and names
// them: on this machine there may be others than the test's.
func TestStatusFindsTheHost(t *testing.T) {
	dir, run := shortDir(t), shortDir(t)
	own := filepath.Join(run, fmt.Sprintf("kvhost-%d", os.Geteuid()))
	testenv.OK(t, os.Mkdir(own, 0o700))
	ask := func() result {
		cmd := command(t, shortDir(t), "status", "--json")
		cmd.Env = append(cmd.Env, "XDG_RUNTIME_DIR="+run)
		return finish(t, cmd)
	}
	first, second := filepath.Join(dir, "a.sock"), filepath.Join(own, "b.sock") // by hand, and by an engine
	startHost(t, dir, "--root", "kv=64MiB", "--socket", first, "--http-listen", "")
	r := ask()
	if alone := strings.Contains(r.stderr, "this is the one at "); !strings.Contains(r.stderr, first) || alone != (r.code == exitOK) ||
		alone && !strings.Contains(r.stdout, `"serving":true`) {
		t.Errorf("status with one host: %+v, want that of %s, named", r, first)
	}
	startHost(t, dir, "--root", "kv2=64MiB", "--socket", second, "--http-listen", "")
	if r := ask(); r.code != exitFailure || !strings.Contains(r.stderr, "--socket") || !strings.Contains(r.stderr, first) || !strings.Contains(r.stderr, second) {
		t.Errorf("status with two hosts: %+v, want exit code %d and both sockets", r, exitFailure)
	}
	if r := finish(t, command(t, dir, "reload")); r.code != exitFailure || !strings.Contains(r.stderr, "no host is running") {
		t.Errorf("reload without a socket: %+v, want that it looks for no other host", r)
	}
}

// A host has two sockets that listen, in the kernel's table, and names may have blanks.
func TestListening(t *testing.T) {
	const table = "Num       RefCount Protocol Flags    Type St Inode Path\n" +
		"0000000000000001: 00000002 00000000 00010000 0001 01 405011 /a b/s.fd\n" +
		"0000000000000002: 00000002 00000000 00010000 0001 01    11 /a b/s\n" +
		"0000000000000003: 00000003 00000000 00000000 0001 03 405012 /c\n" +
		"0000000000000004: 00000002 00000000 00010000 0001 01 405013 /c.fd\n" +
		"0000000000000005: 00000002 00000000 00010000 0001 01 405014 /d\n" +
		"0000000000000006: 00000002 00000000 00010000 0001 01 405015 kvhost.sock\n" +
		"0000000000000007: 00000002 00000000 00010000 0001 01 405016 kvhost.sock.fd\n" +
		"0000000000000008: 00000003 00000000 00000000 0001 03  1141\n"
	if got := listening(table); len(got) != 1 || got[0] != "/a b/s" {
		t.Errorf("hosts in the table: %q, want /a b/s alone", got)
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
