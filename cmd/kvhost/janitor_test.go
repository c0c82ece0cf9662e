package main

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

// TestJanitor bounds a directory in the naming of llm-d and vLLM's file-system tier, with both policies as modules.
func TestJanitor(t *testing.T) {
	dir := t.TempDir()
	fields := `{"dtype":"bfloat16","model_name":"org/model"}`
	sum := sha256.Sum256([]byte(fields))
	base := filepath.Join(dir, "cache", "org_model_"+hex.EncodeToString(sum[:])[:12])
	put := func(name string, bytes int) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(name), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, make([]byte, bytes), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	put(filepath.Join(base, "config.json"), 0)
	write(t, base, "config.json", fields)
	var names []string
	for n := range 8 {
		key := fmt.Sprintf("%016x%016x", uint64(n)<<40+1, n)
		name := fmt.Sprintf("%s_r0/%s/%s_g0/%s.bin", base, key[:3], key[3:5], key)
		put(name, 64<<10)
		then := time.Now().Add(-time.Duration(100-n) * time.Minute)
		if err := os.Chtimes(name, then, then); err != nil {
			t.Fatal(err)
		}
		names = append(names, name)
	}
	left := func() (n int) {
		for _, name := range names {
			if _, err := os.Stat(name); err == nil {
				n++
			}
		}
		return n
	}
	args := []string{"janitor", filepath.Join(dir, "cache"), "--capacity", "300KiB", "--low", "1", "--place",
		"llmd.wasm", "--policy", "lru.wasm", "--json"}
	var r struct {
		DryRun  bool `json:"dry_run"`
		Removed struct{ Files int }
		Used    int64
	}
	for _, c := range []struct {
		args   []string
		remain int
	}{{[]string{"--dry-run"}, 8}, {[]string{"--once"}, 4}, {nil, 4}} {
		got := finish(t, command(t, dir, append(args[:len(args):len(args)], c.args...)...))
		if err := json.Unmarshal([]byte(got.stdout), &r); err != nil || got.code != exitOK {
			t.Fatalf("%v: exit %d, %v: %s%s", c.args, got.code, err, got.stdout, got.stderr)
		}
		if left() != c.remain || r.Used > 300<<10 {
			t.Errorf("%v: %d files remain: %s", c.args, left(), got.stdout)
		}
	}
	if _, err := os.Stat(names[7]); err != nil {
		t.Errorf("the newest: %v", err)
	}
	for _, bad := range [][]string{{"janitor"}, {"janitor", dir}, {"janitor", dir, "--capacity", "1GiB", "--once",
		"--interval", "1s"}} {
		if got := finish(t, command(t, dir, bad...)); got.code != exitUsage {
			t.Errorf("%v: exit %d: %s", bad, got.code, got.stderr)
		}
	}
	if got := finish(t, command(t, dir, "janitor", dir, "--capacity", "1GiB", "--policy",
		"llmd.wasm")); got.code != exitPolicy {
		t.Errorf("a place policy to evict by: exit %d", got.code)
	}
}

// TestJanitorGoesOn bounds a directory round after round until a signal. Files written between two rounds count in the
// next one.
func TestJanitorGoesOn(t *testing.T) {
	dir := t.TempDir()
	cache := filepath.Join(dir, "cache")
	fields := `{"dtype":"bfloat16","model_name":"org/model"}`
	sum := sha256.Sum256([]byte(fields))
	base := filepath.Join(cache, "org_model_"+hex.EncodeToString(sum[:])[:12])
	fill := func(from, to int) {
		t.Helper()
		for n := from; n < to; n++ {
			key := fmt.Sprintf("%016x%016x", uint64(n)<<40+1, n)
			name := fmt.Sprintf("%s_r0/%s/%s_g0/%s.bin", base, key[:3], key[3:5], key)
			if err := os.MkdirAll(filepath.Dir(name), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(name, make([]byte, 64<<10), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	fill(0, 8)
	if err := os.MkdirAll(base, 0o700); err != nil {
		t.Fatal(err)
	}
	write(t, base, "config.json", fields)
	cmd := command(t, dir, "janitor", cache, "--capacity", "300KiB", "--low", "1", "--place", "llmd.wasm", "--json",
		"--quiet", "--interval", "100ms")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := false
	t.Cleanup(func() {
		if !ended {
			cmd.Process.Kill()
			cmd.Wait()
		}
	})
	type round struct {
		Removed struct{ Files int }
		Used    int64
	}
	rounds := json.NewDecoder(out)
	until := func(what string, holds func(r round) bool) {
		t.Helper()
		for {
			var r round
			if err := rounds.Decode(&r); err != nil { // the command has a limit of its own
				t.Fatalf("%s: %v", what, err)
			}
			if r.Used > 300<<10 {
				t.Errorf("%d bytes are left: %+v", r.Used, r)
			}
			if holds(r) {
				return
			}
		}
	}
	until("the first round removes", func(r round) bool { return r.Removed.Files >= 4 })
	until("a round with nothing to do", func(r round) bool { return r.Removed.Files == 0 })
	fill(8, 16)
	until("what came since goes", func(r round) bool { return r.Removed.Files > 0 })
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, out); err != nil {
		t.Fatal(err)
	}
	err, ended = cmd.Wait(), true
	if err != nil {
		t.Errorf("after the signal: %v", err)
	}
}
