package store

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
	"github.com/kvhost/kvhost/staging/faultfs"
)

// TestAPieceInTwoSizes: a scan finds a piece twice, under a place policy's name and the built-in one, or another
// policy's, and one of its files is compressed. One file stays, and the account has what it takes.
func TestAPieceInTwoSizes(t *testing.T) {
	for _, compressed := range []bool{false, true} { // the file under the place policy's name
		for _, other := range []string{"built-in", "earlier"} {
			for _, back := range []bool{false, true} {
				t.Run(fmt.Sprintf("compressed=%t/%s/back=%t", compressed, other, back), func(t *testing.T) {
					// file is the piece as a store writes it, and its name below the root.
					file := func(w string, compressed bool) (rel string, b []byte) {
						f := compressing(t, t.TempDir(), inOrder(back), func(c *Config) {
							c.Roots[0].Compressed = compressed
							if w != "" {
								c.Policies.Place = widths(t, w)
							}
						})
						f.ns.TensorParallel = 2
						f.restart()
						f.must(f.storeHalf(0))
						name := f.pieceFile(0, 0)
						b, err := os.ReadFile(name)
						f.must(err)
						rel, err = filepath.Rel(f.cfg.Roots[0].Path, name)
						f.must(err)
						return rel, b
					}
					now, kept := file("1/1/1", compressed)
					before, second := file(map[string]string{"built-in": "", "earlier": "2/2"}[other], !compressed)
					if now == before || len(kept) == len(second) {
						t.Fatal(now, before, len(kept), len(second))
					}
					f := compressing(t, t.TempDir(), inOrder(back), func(c *Config) {
						if other == "earlier" {
							c.Policies.Place = widths(t, "2/2")
						}
					})
					f.ns.TensorParallel = 2
					f.restart()
					f.must(f.storeHalfOf(1, 0)) // so that there is an earlier policy with files
					f.must(f.storeHalfOf(1, 1))
					f.cfg.Policies.Place = widths(t, "1/1/1")
					f.restart()
					f.must(f.storeHalfOf(0, 1)) // of one size
					f.must(f.store.Close())
					root := f.cfg.Roots[0].Path
					f.must(os.Remove(filepath.Join(root, pieceformat.CheckpointFile)))
					put(t, filepath.Join(root, now), kept)
					put(t, filepath.Join(root, before), second)
					f.start()
					<-f.store.ScanDone()
					bytes, temps := usage(t, root)
					equal(t, "bytes in the account", f.store.Stats().Roots[0].Used, bytes)
					equal(t, "temporaries", temps, 0)
					equal(t, "files", len(f.files()), 4)
					for n := range uint64(2) {
						f.readHalf(n)
					}
					f.drop(0)
					f.drop(1)
					equal(t, "bytes in the account of an empty root", f.store.Stats().Roots[0].Used, 0)
					bytes, _ = usage(t, root)
					equal(t, "bytes in files of an empty root", bytes, 0)
				})
			}
		}
	}
}

// TestStoredAgainInAnotherSize: a piece could not be unlinked and is stored again, compressed now or not any more. The account
// has what its file takes, whichever of the two that is.
func TestStoredAgainInAnotherSize(t *testing.T) {
	for _, compressed := range []bool{false, true} {
		t.Run(fmt.Sprintf("compressed=%t", compressed), func(t *testing.T) {
			faulty := faultfs.New(staging.OS())
			f := compressing(t, t.TempDir(), func(c *Config) { c.FS, c.Roots[0].Compressed = faulty, !compressed })
			r := f.root()
			f.must(f.storeHalf(0))
			check := func(when string, files int64) {
				t.Helper()
				bytes, temps := usage(t, r.Path)
				equal(t, when+": bytes in the account", f.store.Stats().Roots[0].Used, bytes)
				equal(t, when+": temporaries", temps, 0)
				equal(t, when+": files", int64(len(f.files())), files)
			}
			faulty.Set(faultfs.MustRules("remove ** : eio")...)
			r.drop(f.markOf(0), 0)
			faulty.Set()
			check("it is not unlinked", 1)
			r.cfg.Compressed = compressed
			f.must(f.storeHalf(0))
			check("it is stored again", 1)
			f.maintain(RetryRemovals)
			check("tried again", 1)
			f.readHalf(0)
			equal(t, "Orphaned", f.store.Stats().Roots[0].Orphaned, 0)
			r.drop(f.markOf(0), 0)
			check("it goes", 0)
		})
	}
}
