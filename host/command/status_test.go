package command

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

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
	for _, name := range []string{"status", "top"} {
		if r := finish(t, command(t, dir, name)); r.code != exitFailure || !strings.Contains(r.stderr, "no host is running") {
			t.Errorf("%s without a host: exit code %d, %s", name, r.code, r.stderr)
		}
	}
}
