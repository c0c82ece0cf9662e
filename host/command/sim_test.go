package command

import (
	"bufio"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/testkit/policytest"
)

func simTrace(t *testing.T) string {
	t.Helper()
	path, err := filepath.Abs(mixedTrace)
	testenv.OK(t, err)
	return path
}

// shortTrace is the begin of the trace, under its name.
func shortTrace(t *testing.T, requests int) string {
	t.Helper()
	f, err := os.Open(mixedTrace)
	testenv.OK(t, err)
	defer f.Close()
	z, err := zstd.NewReader(f)
	testenv.OK(t, err)
	defer z.Close()
	text, lines := "", bufio.NewReader(z)
	for range requests {
		line, err := lines.ReadString('\n')
		testenv.OK(t, err)
		text += line
	}
	return write(t, t.TempDir(), "mixed.jsonl", text)
}

func TestSimJSON(t *testing.T) {
	r := finish(t, command(t, t.TempDir(), "sim", "--trace", simTrace(t), "--policy", "lru.wasm", "--policy", "belady",
		"--policy", "infinite", "--capacity", "1%,500", "--json"))
	if r.code != exitOK {
		t.Fatalf("exit %d: %s", r.code, r.stderr)
	}
	var rows []struct {
		Trace, Policy            string
		Capacity, Accesses, Hits int
		MissRatio                float64 `json:"miss_ratio"`
		AccessesPerSecond        float64 `json:"accesses_per_second"`
	}
	testenv.OK(t, json.Unmarshal([]byte(r.stdout), &rows))
	if len(rows) != 6 {
		t.Fatalf("%d rows, want 3 policies at 2 capacities", len(rows))
	}
	for k := range 2 {
		lru, belady, infinite := rows[k], rows[2+k], rows[4+k]
		if lru.Policy != "lru.wasm" || belady.Policy != "belady" || infinite.Policy != "infinite" {
			t.Errorf("the policies of row %d are %s, %s, %s", k, lru.Policy, belady.Policy, infinite.Policy)
		}
		if belady.Hits <= lru.Hits || infinite.Hits < belady.Hits {
			t.Errorf("hits: %d of lru, %d of belady, %d of infinite", lru.Hits, belady.Hits, infinite.Hits)
		}
		if lru.Trace != "mixed" || lru.AccessesPerSecond <= 0 || lru.MissRatio <= 0 || lru.MissRatio >= 1 {
			t.Errorf("the row of lru is %+v", lru)
		}
	}
}

func TestSimLevels(t *testing.T) {
	args := []string{"sim", "--trace", shortTrace(t, 300), "--level", "0=2%,1=20%", "--cost", "0=50,1=5", "--policy", "lru.wasm",
		"--write", "back,through", "--admit", "all"}
	r := finish(t, command(t, t.TempDir(), append(args, "--json")...))
	if r.code != exitOK {
		t.Fatalf("exit %d: %s", r.code, r.stderr)
	}
	var rows []struct {
		Policy, Write string
		Loaded        int64   `json:"bytes_loaded"`
		Saved         float64 `json:"seconds_saved"`
		Levels        []struct{ Capacity, Hits, New, Demotions int }
	}
	testenv.OK(t, json.Unmarshal([]byte(r.stdout), &rows))
	if len(rows) != 2 {
		t.Fatalf("%d rows, want one for each way to write", len(rows))
	}
	for _, row := range rows {
		if row.Saved <= 0 || row.Loaded <= 0 || len(row.Levels) != 2 {
			t.Fatalf("a row of two levels is %+v", row)
		}
		if below := row.Levels[1]; (row.Write == "back") != (below.New == 0) || below.Capacity != 300 {
			t.Errorf("written %s, the farther level is %+v", row.Write, below)
		}
	}
	r = finish(t, command(t, t.TempDir(), append(args, "--level-policy", "1=fifo")...))
	for _, want := range []string{"mixed: ", "chunks of 67.11 MB", "lru, through", "level 0: 30 chunks, 50 GB/s", ", fifo"} {
		if r.code != exitOK || !strings.Contains(r.stdout, want) {
			t.Errorf("no %q in\n%s%s", want, r.stdout, r.stderr)
		}
	}
}

func TestSimExitCodes(t *testing.T) {
	path, dir := simTrace(t), t.TempDir()
	broken := filepath.Join(dir, "broken.jsonl")
	testenv.OK(t, os.WriteFile(broken, []byte("{\"timestamp\": 1\n"), 0o600))
	for _, c := range []struct {
		name string
		args []string
		code int
		says string
	}{
		{"no trace", nil, exitUsage, "--trace"},
		{"no such trace", []string{"--trace", "nowhere.jsonl"}, exitTrace, "nowhere.jsonl"},
		{"a broken trace", []string{"--trace", broken}, exitTrace, "broken.jsonl:1"},
		{"no such policy", []string{"--trace", path, "--policy", "nothing.wasm"}, exitPolicy, "nothing.wasm"},
		{"a policy of another role", []string{"--trace", path, "--policy", "fanout.wasm"}, exitPolicy,
			"does not evict"},
		{"a setting it does not have", []string{"--trace", path, "--policy", "lru.wasm:speed=9"}, exitPolicy, "speed"},
		{"a bad capacity", []string{"--trace", path, "--capacity", "0%"}, exitUsage, `"0%"`},
		{"hosts, which it had", []string{"--trace", path, "--hosts", "8"}, exitUsage, "it is gone: "},
		{"a bad ratio", []string{"--trace", path, "--compression-ratio", "0.5"}, exitUsage, "compression ratio 0.5"},
		{"a level without a speed", []string{"--trace", path, "--level", "0=2%,1=5%", "--cost", "0=50"}, exitUsage, "no speed of level 1"},
		{"a speed without a level", []string{"--trace", path, "--cost", "0=50"}, exitUsage, "--cost wants --level"},
		{"levels and capacities", []string{"--trace", path, "--level", "0=2%", "--cost", "0=50", "--capacity", "5%"}, exitUsage,
			"--capacity does not go with --level"},
		{"the optimum in levels", []string{"--trace", path, "--level", "0=2%", "--cost", "0=50", "--policy", "belady"}, exitUsage,
			"has no levels"},
		{"a policy of no level", []string{"--trace", path, "--level", "0=2%", "--cost", "0=50", "--level-policy", "1=lru.wasm"},
			exitUsage, "no level 1"},
		{"an evict policy that should admit", []string{"--trace", path, "--level", "0=2%", "--cost", "0=50", "--admit", "lru.wasm"},
			exitPolicy, "does not admit"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := finish(t, command(t, dir, append([]string{"sim"}, c.args...)...))
			if r.code != c.code || !strings.Contains(r.stderr, c.says) {
				t.Errorf("exit %d, want %d with %q: %s", r.code, c.code, c.says, r.stderr)
			}
		})
	}
}

// A textbook policy is not in the binary: an error says how to get it, and the directory that it is built to serves sim and a host.
func TestTextbookPolicies(t *testing.T) {
	trace := simTrace(t)
	r := finish(t, command(t, t.TempDir(), "sim", "--quiet", "--trace", trace, "--capacity", "1%", "--policy", "arc.wasm"))
	if r.code != exitPolicy || !strings.Contains(r.stderr, "make plugins") || !strings.Contains(r.stderr, "policy_dir") {
		t.Errorf("arc, which is not embedded: want exit code %d and the way to get it, got %d and %q", exitPolicy, r.code, r.stderr)
	}
	r = finish(t, command(t, t.TempDir(), "sim", "--quiet", "--trace", trace, "--capacity", "1%", "--policy", "arc.wasm", "--policy-dir", policytest.Dir(t, "arc")))
	if r.code != exitOK || !strings.Contains(r.stdout, "arc") || !strings.Contains(r.stdout, "whole run: ") {
		t.Errorf("arc, from a directory: want exit code %d and its hit ratio, got %d, %q and %q", exitOK, r.code, r.stdout, r.stderr)
	}
	if r := finish(t, command(t, t.TempDir(), "version")); !strings.Contains(r.stdout, "blockmajor fanout fifo layermajor llmd lru prefix reuse s3fifo striped") {
		t.Errorf("want the ten embedded policies, got %q", r.stdout)
	}
}
