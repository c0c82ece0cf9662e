package command

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/host/internal/config"
)

// check reports what it found, as text and as JSON, leaves nothing behind, and exits with 9 when something cannot work.
func TestCheck(t *testing.T) {
	dir := shortDir(t)
	r := finish(t, command(t, dir, "check", "--root", "kv=1MiB", "--socket", "s", "--http-listen", ""))
	if r.code != 0 || !strings.Contains(r.stdout, "staged") || !strings.Contains(r.stdout, "does not exist yet") {
		t.Errorf("check: exit code %d\n%s%s", r.code, r.stdout, r.stderr)
	}
	r = finish(t, command(t, dir, "check", "--json", "--root", dir+"=1MiB", "--socket", "s", "--http-listen", "", "--gds-cuda", "off"))
	var report struct {
		Verdicts []struct{ Root, Route string }
		Facts    struct {
			Roots []struct{ Writable bool }
		}
	}
	if err := json.Unmarshal([]byte(r.stdout), &report); err != nil || r.code != 0 ||
		report.Verdicts[0].Route != "staged" || !report.Facts.Roots[0].Writable {
		t.Errorf("check --json: exit code %d, %v, want a staged route to a writable root\n%s%s", r.code, err, r.stdout, r.stderr)
	}
	file := write(t, dir, "file", "")
	r = finish(t, command(t, dir, "check", "--root", filepath.Join(file, "kv")+"=1MiB", "--socket", "missing/s", "--http-listen", ""))
	if r.code != exitFailure || strings.Count(r.stdout, "problem") != 2 || !strings.Contains(r.stderr, "would not start") {
		t.Errorf("check of an impossible root and socket: exit code %d, want two problems\n%s%s", r.code, r.stdout, r.stderr)
	}
	if left, _ := os.ReadDir(dir); len(left) != 1 {
		t.Errorf("left behind: %v", left)
	}
}

// A configuration that forbids cuFile forbids it to check: the library is not loaded, and no device memory counts for
// slots. The memory of the copy threads always counts.
func TestCheckWantsWhatTheHostTries(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*config.Config)
		cufile bool
		direct bool
		memory int64 // MiB
	}{
		"by default":     {func(*config.Config) {}, true, true, 1024 + 96},
		"use_cufile off": {func(c *config.Config) { c.GDS.UseCuFile = false }, false, false, 96},
		"no buffer":      {func(c *config.Config) { c.GDS.BufferMiB = 0 }, false, false, 96},
		"cuda off":       {func(c *config.Config) { c.GDS.CUDA = config.CUDAOff }, false, false, 0},
		"compression": {func(c *config.Config) { c.Store.Compression = config.CompressionAuto }, true, true,
			1024 + 4*2*96 + 1}, // windows twice as large, three times that beside them, and rows
		"staged": {func(c *config.Config) { c.Roots[0].Route = config.RouteStaged }, true, false, 96},
	} {
		cfg := config.Default().Clone()
		cfg.Roots = []config.Root{{Path: "kv", Capacity: 1 << 30}}
		c.change(cfg)
		if memory := deviceBytes(cfg); cfg.MayUseCuFile() != c.cufile || memory>>20 != c.memory || cfg.TriesDirect(cfg.Roots[0]) != c.direct {
			t.Errorf("%s: cuFile %t, a direct route %t, %d bytes of a GPU's memory, want %+v", name, cfg.MayUseCuFile(), cfg.TriesDirect(cfg.Roots[0]), memory, c)
		}
	}
}
