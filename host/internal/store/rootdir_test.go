package store

import (
	"bytes"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/host/internal/store/health"
)

// A root is made, what is above it is not: where that is missing, a file system is not mounted.
func TestParentIsNotMade(t *testing.T) {
	dir := t.TempDir()
	f := newFixture(t, filepath.Join(dir, "kv"), 4, 1)
	must(t, f.store.Close())
	c := f.cfg
	c.Roots[0].Path = filepath.Join(dir, "mnt", "kv")
	s, err := Open(t.Context(), c)
	if err == nil {
		s.Close()
	}
	if !errors.Is(err, health.ErrNoParent) || !strings.Contains(err.Error(), "mkdir -p "+filepath.Join(dir, "mnt")) {
		t.Errorf("opened in a directory that is not there: %v", err)
	}
	if _, err := os.Stat(filepath.Join(dir, "mnt")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("its parent was made: %v", err)
	}
}

// A host that promises more than its file system has says so when it starts, and else does not.
func TestPromisedCapacityIsJudged(t *testing.T) {
	const says = "less room than the root's capacity"
	for _, c := range []struct {
		capacity int64
		warns    bool
	}{{1 << 20, false}, {1 << 60, true}} {
		var log bytes.Buffer
		f := newFixture(t, t.TempDir(), 4, 1, func(cfg *Config) {
			cfg.Log = slog.New(slog.NewTextHandler(&log, nil))
			cfg.Roots[0].Capacity, cfg.Roots[0].MaxEntries = c.capacity, 64
		})
		must(t, f.store.Close())
		if warned := strings.Contains(log.String(), says); warned != c.warns {
			t.Errorf("capacity %d: warned %v\n%s", c.capacity, warned, log.String())
		}
	}
}
