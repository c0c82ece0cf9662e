package store

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
)

// TestRootsApart: roots that are one directory, or one inside the other, are refused, in one configuration and of two hosts.
func TestRootsApart(t *testing.T) {
	dir := t.TempDir()
	outer, link := filepath.Join(dir, "outer"), filepath.Join(dir, "link")
	inner, deep := filepath.Join(outer, "inner"), filepath.Join(outer, "a", "b")
	must(t, os.MkdirAll(filepath.Dir(deep), 0o700))
	must(t, os.Symlink(outer, link))
	config := func(paths ...string) Config {
		c := Config{Now: fakeClock(), HostID: "testhost"}
		for _, p := range paths {
			c.Roots = append(c.Roots, RootConfig{Path: p, Capacity: 1 << 20})
		}
		return c
	}
	refused := func(want string, paths ...string) {
		t.Helper()
		s, err := Open(t.Context(), config(paths...))
		if err == nil {
			s.Close()
		}
		if !errors.Is(err, ErrConfig) || !strings.Contains(fmt.Sprint(err), want) {
			t.Errorf("roots %q: error %v, want %v: %s", paths, err, ErrConfig, want)
		}
	}
	refused("one directory", outer, link)
	refused("inside of the root "+outer, outer, inner)
	refused("inside of the root "+outer, inner, outer)
	refused("inside of the root "+link, link, deep)
	must(t, os.RemoveAll(outer))
	must(t, os.Mkdir(outer, 0o700))
	f := newFixtureIn(t, outer, 4, 1)
	f.mustPut(0)
	refused("another host's root", inner)
	refused("another host's root", filepath.Join(link, "inner"))
	must(t, f.store.Close())
	must(t, os.MkdirAll(filepath.Join(inner, pieceformat.MetaDir), 0o700))
	refused("has another one in it", outer)

	// What is deeper is left alone.
	must(t, os.MkdirAll(filepath.Join(outer, "more"), 0o700))
	must(t, os.Rename(inner, filepath.Join(outer, "more", "inner")))
	other := filepath.Join(outer, "more", "inner", filepath.Base(f.pieceFile(0, 0)))
	image, err := os.ReadFile(f.pieceFile(0, 0))
	must(t, err)
	must(t, os.WriteFile(other, image, 0o600))
	_ = os.Remove(filepath.Join(outer, pieceformat.CheckpointFile))
	f.start()
	f.mustRead(0)
	equal(t, "Used", f.store.Stats().Roots[0].Used, pieceBytes)
	if _, err := os.Stat(other); err != nil {
		t.Errorf("a piece of another root is gone, want it left alone: %v", err)
	}
}
