package store

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
)

// emptyDirs are the directories of pieces in which there is nothing.
func (f *fixture) emptyDirs() (empty []string) {
	f.Helper()
	root := f.cfg.Roots[0].Path
	err := filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		if err != nil || !d.IsDir() || path == root {
			return err
		}
		if strings.HasPrefix(d.Name(), pieceformat.MetaDir) {
			return fs.SkipDir
		}
		inside, err := os.ReadDir(path)
		if len(inside) == 0 {
			empty = append(empty, path)
		}
		return err
	})
	must(f, err)
	return empty
}

// A directory goes with the last piece in it, whether its file is unlinked or becomes another piece's.
func TestEmptyDirectoriesGo(t *testing.T) {
	for _, unlinks := range []bool{false, true} {
		f := newFixture(t, t.TempDir(), 3, 2)
		if unlinks {
			f.unlinkVictims()
		}
		for n := range uint64(20) {
			f.mustPut(n)
			if empty := f.emptyDirs(); len(empty) > 0 {
				t.Fatalf("unlinks %v: after key %d nothing is in %v", unlinks, n, empty)
			}
		}
		if reused := f.recycled() > 0; reused == unlinks {
			t.Errorf("unlinks %v: %d files were taken over", unlinks, f.recycled())
		}
		f.restart()
		for n := uint64(17); n < 20; n++ {
			f.mustHold(n)
		}
	}
}

// undoing removes each directory as soon as it was made, so many times, as the eviction of its only piece would.
type undoing struct {
	staging.FS
	left atomic.Int32
}

func (u *undoing) MkdirAll(name string, perm fs.FileMode) error {
	err := u.FS.MkdirAll(name, perm)
	if err == nil && strings.Contains(name, "/kv/") && !strings.Contains(name, pieceformat.MetaDir) && u.left.Add(-1) >= 0 {
		err = u.FS.Remove(name)
	}
	return err
}

// A put whose directory goes before its file is there makes it again.
func TestADirectoryGoesBeforeItsFile(t *testing.T) {
	for _, strict := range []bool{false, true} {
		fsys := &undoing{FS: staging.OS()}
		f := newFixture(t, filepath.Join(t.TempDir(), "kv"), 3, 1, func(c *Config) {
			c.FS = fsys
			if strict {
				c.Strict = true
			}
		})
		for n := range uint64(9) { // the last ones take files over
			fsys.left.Store(3)
			f.mustPut(n)
			if fsys.left.Load() >= 3 {
				t.Fatal("no directory went")
			}
			f.mustHold(n)
		}
	}
}

// Where a place policy makes five directories for each piece, the pieces and the directories stay within the capacity and
// what is tolerated, also after a start.
func TestDirectoriesStayWithinTheCapacity(t *testing.T) {
	alone := linkedPlacer(func(q *abi.PlaceQuery, dst []byte) []byte {
		return fmt.Appendf(dst, "%x/a/b/c/d/piece", q.Key[:q.KeyLen])
	})
	const entries = 400
	f := newFixture(t, t.TempDir(), entries, 1, func(c *Config) { c.Policies.Place = alone.use("alone") })
	root := f.cfg.Roots[0]
	const block = 4096
	directories := func() (dirs int64) {
		t.Helper()
		err := filepath.WalkDir(root.Path, func(_ string, d os.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				dirs++
			}
			return err
		})
		must(t, err)
		return dirs
	}
	counted := func() { // in the background after a start; until then they leave too much for pieces
		t.Helper()
		dirs := directories()
		await(t, "the account of directories is the disk's", func() bool {
			return f.root().Account.Figures().Limit == root.Capacity-max(0, dirs*block-1<<20)
		})
	}
	within := func() {
		t.Helper()
		counted()
		pieces, _ := usage(t, root.Path)
		dirs := directories()
		const tolerated = 1<<20 + 6*block // and those of the latest piece
		if over := pieces + dirs*block - root.Capacity - tolerated; over > 0 || dirs < 200 {
			t.Errorf("%d bytes of pieces and %d directories: %d bytes too many for %d", pieces, dirs, over, root.Capacity)
		}
	}
	f.mustPut(upTo(2 * entries)...)
	within()
	f.cfg.Policies.Place = alone.use("alone") // the fixture released it
	f.restart()
	counted()
	for n := range uint64(entries) {
		f.mustPut(1<<20 + n)
	}
	within()
}
