package command

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/testkit/s3double"
)

// TestFsck fills a root by a replay, damages a piece, and goes through check, repair and check.
func TestFsck(t *testing.T) {
	dir := t.TempDir()
	root := filepath.Join(dir, "kv")
	if r := finish(t, command(t, dir, "replay", "--embedded", "--trace", simTrace(t), "--capacity", "200", "--limit",
		"20", "--store", root)); r.code != exitOK {
		t.Fatalf("replay: exit %d: %s", r.code, r.stderr)
	}
	r := finish(t, command(t, dir, "fsck", root))
	if r.code != exitOK || !strings.Contains(r.stdout, "0 remain") {
		t.Fatalf("exit %d: %s%s", r.code, r.stdout, r.stderr)
	}
	var victim string
	if err := filepath.WalkDir(root, func(name string, e os.DirEntry, err error) error {
		if err == nil && !e.IsDir() && strings.HasSuffix(name, ".kv") {
			victim = name
		}
		return err
	}); err != nil || victim == "" {
		t.Fatalf("no piece in %s: %v", root, err)
	}
	b, err := os.ReadFile(victim)
	testenv.OK(t, err)
	b[8192] ^= 1
	testenv.OK(t, os.WriteFile(victim, b, 0o600))
	var reports []struct {
		Pieces    struct{ Files int }
		Remaining int
		Repaired  int
		Problems  []struct{ Path, Kind, Done, Advice string }
	}
	for _, c := range []struct {
		args []string
		code int
		kind string
	}{
		{[]string{"fsck", "--quick", "--json", root}, exitOK, ""},
		{[]string{"fsck", "--json", root}, exitProblems, "damaged"},
		{[]string{"fsck", "--json", "--repair", root}, exitOK, "damaged"},
		{[]string{"fsck", "--json", root}, exitOK, ""},
	} {
		r := finish(t, command(t, dir, c.args...))
		if err := json.Unmarshal([]byte(r.stdout), &reports); err != nil || len(reports) != 1 {
			t.Fatalf("report of %v: %v: %s%s", c.args, err, r.stdout, r.stderr)
		}
		kind := ""
		if p := reports[0].Problems; len(p) == 1 {
			kind = p[0].Kind
			if filepath.Join(root, p[0].Path) != victim {
				t.Errorf("%v: got problem %+v, want it to name the victim", c.args, p[0])
			}
		}
		if r.code != c.code || kind != c.kind || reports[0].Pieces.Files == 0 {
			t.Errorf("%v: exit %d, %+v", c.args, r.code, reports[0])
		}
	}
	for _, args := range [][]string{{"fsck"}, {"fsck", "--read-limit", "fast", root}} {
		if r := finish(t, command(t, dir, args...)); r.code != exitUsage {
			t.Errorf("%v: exit %d", args, r.code)
		}
	}
	if r := finish(t, command(t, dir, "fsck", filepath.Join(dir, "missing"))); r.code != exitFailure {
		t.Errorf("a missing root: exit %d", r.code)
	}
}

// TestFsckFindsTheBucket: a bucket is reached as the configuration says.
func TestFsckFindsTheBucket(t *testing.T) {
	t.Setenv("AWS_ACCESS_KEY_ID", "key")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "secret")
	s := s3double.Start(t)
	s.Set("kv/.kvhost/written", []byte("junk"))
	file := filepath.Join(t.TempDir(), "kvhost.toml")
	testenv.OK(t, os.WriteFile(file, []byte("[[root]]\npath = \"s3://bucket/kv\"\npath_style = true\nendpoint = \""+s.URL+"\"\n"), 0o600))
	r := finish(t, command(t, t.TempDir(), "fsck", "--config", file, "s3://bucket/kv/"))
	if r.code != exitProblems || !strings.Contains(r.stdout, ".kvhost/written") || s.Count("LIST") == 0 {
		t.Errorf("exit %d, %d lists, want %d and the damaged file: %s%s", r.code, s.Count("LIST"), exitProblems, r.stdout, r.stderr)
	}
}
