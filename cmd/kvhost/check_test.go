package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// check says what it found, as text and as JSON, leaves nothing behind, and its exit code says whether all can work.
func TestCheck(t *testing.T) {
	dir := shortDir(t)
	r := finish(t, command(t, dir, "check", "--root", "kv=1MiB", "--socket", "s"))
	if r.code != 0 || !strings.Contains(r.stdout, "staged") || !strings.Contains(r.stdout, "does not exist yet") {
		t.Errorf("%d\n%s%s", r.code, r.stdout, r.stderr)
	}
	r = finish(t, command(t, dir, "check", "--json", "--root", dir+"=1MiB", "--socket", "s", "--gds-cuda", "off"))
	var report struct {
		Verdicts []struct{ Root, Route string }
		Facts    struct {
			Roots []struct{ Writable bool }
		}
	}
	if err := json.Unmarshal([]byte(r.stdout), &report); err != nil || r.code != 0 || report.Verdicts[0].Route != "staged" || !report.Facts.Roots[0].Writable {
		t.Errorf("%d, %v\n%s%s", r.code, err, r.stdout, r.stderr)
	}
	file := write(t, dir, "file", "")
	r = finish(t, command(t, dir, "check", "--root", filepath.Join(file, "kv")+"=1MiB", "--socket", "missing/s"))
	if r.code != exitCheck || strings.Count(r.stdout, "problem") != 2 || !strings.Contains(r.stderr, "cannot work") {
		t.Errorf("%d\n%s%s", r.code, r.stdout, r.stderr)
	}
	if left, _ := os.ReadDir(dir); len(left) != 1 {
		t.Errorf("left behind: %v", left)
	}
}
