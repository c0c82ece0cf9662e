package main

import (
	"encoding/json"
	"os"
	"strings"
	"testing"
)

// bench prints its table for host memory, as text and as JSON, and leaves nothing behind. Figures are not compared.
func TestBench(t *testing.T) {
	dir := shortDir(t)
	args := []string{"bench", "--root", dir, "--memory", "host", "--chunks", "1", "--rounds", "1", "--pages", "mla"}
	r := finish(t, command(t, dir, args...))
	if r.code != 0 || strings.Count(r.stdout, "| staged |") != 6 ||
		strings.Count(r.stdout, "the first layer of all chunks") != 2 {
		t.Errorf("%d\n%s%s", r.code, r.stdout, r.stderr)
	}
	r = finish(t, command(t, dir, append(args, "--json", "--engine-direct-io=false")...))
	var rows []struct{ Pass string }
	if err := json.Unmarshal([]byte(r.stdout), &rows); err != nil || r.code != 0 || len(rows) != 3 {
		t.Errorf("%d, %v\n%s%s", r.code, err, r.stdout, r.stderr)
	}
	if left, _ := os.ReadDir(dir); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	for _, wrong := range [][]string{{"--memory", "x"}, {"--pages", "x"}} {
		if r := finish(t, command(t, dir, append([]string{"bench", "--root", dir}, wrong...)...)); r.code != exitUsage {
			t.Errorf("%v: %d\n%s", wrong, r.code, r.stderr)
		}
	}
}
