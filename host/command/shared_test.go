package command

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
)

// TestSharedRoot runs two hosts on one directory, clients on both, and kills the one that evicts.
func TestSharedRoot(t *testing.T) {
	t.Parallel() // it waits more than it works
	dir := testenv.Dir(t)
	const capacity = 24 << 20
	conf := func(id string) []string {
		text := fmt.Sprintf(`socket = %q
[http]
listen = %q
[store]
host_id = %q
shared_poll = "50ms"
shared_lapse = "5s"
[[root]]
path = %q
capacity = %d
shared = true
`, filepath.Join(dir, id), anyPort, id, filepath.Join(dir, "kv"), capacity)
		return []string{"--config", write(t, dir, id+".toml", text), "--log-format", "json"}
	}
	type figures struct {
		Hits, Accesses  int
		MismatchedBytes int `json:"mismatched_bytes"`
	}
	play := func(id, limit string) (f figures) {
		t.Helper()
		r := finish(t, command(t, dir, "replay", "--socket", filepath.Join(dir, id), "--trace", simTrace(t), "--limit",
			limit, "--json"))
		if r.code != exitOK {
			t.Fatalf("replay on %s: exit %d: %s", id, r.code, r.stderr)
		}
		if err := json.Unmarshal([]byte(r.stdout), &f); err != nil {
			t.Fatalf("report of the replay: %v: %s", err, r.stdout)
		}
		return f
	}
	_, logA, stopA := startHost(t, dir, conf("a")...)
	_, logB, stopB := startHost(t, dir, conf("b")...)
	if !strings.Contains(logA(), "elected evictor of the shared root") ||
		strings.Contains(logB(), "elected evictor of the shared root") {
		t.Fatalf("the first host is not the evictor:\n%s\n%s", logA(), logB())
	}
	const some = "12" // requests whose chunks all fit, beside the credit that both hosts may hold
	first := play("a", some)
	entries := func(logged func() string) int64 { return gauge(t, httpAddress(t, logged), "kvhost_root_entries") }
	until(t, "entries of one host at the other", func() bool { n := entries(logA); return n > 0 && entries(logB) == n })
	second := play("b", some)
	if second.Hits <= first.Hits {
		t.Errorf("b hits %d of %d chunks that a stored, a itself %d", second.Hits, second.Accesses, first.Hits)
	}
	within := func(when string) {
		t.Helper()
		if n := taken(t, filepath.Join(dir, "kv")); n > capacity {
			t.Errorf("%s: %d bytes on disk, the capacity is %d", when, n, capacity)
		}
	}
	within("both run")
	stopA(syscall.SIGKILL)
	await(t, logB, "elected evictor of the shared root", nil)
	third := play("b", "300")
	within("one was killed")
	if third.MismatchedBytes+second.MismatchedBytes+first.MismatchedBytes != 0 {
		t.Error("wrong bytes")
	}
	_, _, stopA = startHost(t, dir, conf("a")...)
	if again := play("a", "300"); again.Hits == 0 {
		t.Error("the host that came back finds nothing")
	}
	within("it is back")
	if a, b := stopA(syscall.SIGTERM), stopB(syscall.SIGTERM); a != exitOK || b != exitOK {
		t.Errorf("exit %d and %d", a, b)
	}
	if r := finish(t, command(t, dir, "fsck", filepath.Join(dir, "kv"))); r.code != exitOK {
		t.Errorf("fsck: exit %d: %s", r.code, r.stdout)
	}
}

// taken is the bytes on disk of a root's pieces, temporaries and trash, each file once.
func taken(t *testing.T, root string) (n int64) {
	t.Helper()
	seen := map[uint64]bool{}
	err := filepath.WalkDir(root, func(name string, e os.DirEntry, err error) error {
		if os.IsNotExist(err) {
			return nil
		}
		if err != nil || e.IsDir() || strings.Contains(name, ".kvhost") && !strings.Contains(name, "/t/") &&
			!strings.Contains(name, "/trash/") {
			return err
		}
		var st syscall.Stat_t
		if syscall.Lstat(name, &st) == nil && !seen[st.Ino] && e.Type()&fs.ModeSymlink == 0 {
			seen[st.Ino] = true
			n += st.Blocks * 512
		}
		return nil
	})
	testenv.OK(t, err)
	return n
}
