package store

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
)

// TestOneRootCannotBeOpened starts while a file stands in the place of one of two roots. The other serves; when the
// directory is there again, so does that one, with what it had.
func TestOneRootCannotBeOpened(t *testing.T) {
	for _, how := range []string{"checkpoint", "scan"} {
		t.Run(how, func(t *testing.T) {
			second := filepath.Join(t.TempDir(), "second")
			f := newFixture(t, t.TempDir(), 40, 1, func(c *Config) {
				c.UpkeepEvery = time.Millisecond
				c.Roots = append(c.Roots, c.Roots[0])
				c.Roots[1].Path = second
			})
			var there []uint64 // in the second root
			for n := range uint64(20) {
				f.mustPut(n)
				l := f.lookup(n)
				if l.grants[0].Root == 1 {
					there = append(there, n)
				}
				l.Release()
			}
			if len(there) == 0 || len(there) == 20 {
				t.Fatalf("%d of 20 are in the second root", len(there))
			}
			must(t, f.store.Close())
			if how == "scan" {
				must(t, os.Remove(filepath.Join(second, pieceformat.CheckpointFile)))
			}
			must(t, os.Rename(second, second+".gone"))
			put(t, second, nil)
			f.cfg.ScanWait = -1
			f.open()
			if st := f.store.Stats().Roots[1]; st.State != health.Out {
				t.Fatalf("the second root is %s", st.State)
			}
			for n := range uint64(20) {
				if away := slices.Contains(there, n); f.has(n) == away {
					t.Errorf("key %d: a hit is %t, in the second root is %t", n, !away, away)
				}
			}
			f.mustPut(100)
			must(t, os.Remove(second))
			must(t, os.Rename(second+".gone", second))
			await(t, "the second root is opened", func() bool { return f.store.Stats().Roots[1].State == health.In })
			<-f.store.ScanDone()
			f.mustRead(upTo(20)...)
			f.mustRead(100)
			if st := f.store.Stats().Roots[1]; (st.Scanned == 0) != (how == "checkpoint") {
				t.Errorf("%d files were scanned", st.Scanned)
			}
			f.restart()
			f.mustRead(upTo(20)...)
		})
	}
}

// TestNoRootCanBeOpened: then there is nothing to serve with.
func TestNoRootCanBeOpened(t *testing.T) {
	dir := t.TempDir()
	f := newFixture(t, dir, 4, 1)
	must(t, f.store.Close())
	c := f.cfg
	c.Roots = append(slices.Clone(c.Roots), c.Roots[0])
	for i := range c.Roots {
		c.Roots[i].Path = filepath.Join(dir, string(rune('a'+i)))
		put(t, c.Roots[i].Path, nil)
	}
	if s, err := Open(t.Context(), c); err == nil {
		s.Close()
		t.Fatal("it was opened")
	} else if !errors.Is(err, fs.ErrExist) && !strings.Contains(err.Error(), "not a directory") {
		t.Error(err)
	}
}
