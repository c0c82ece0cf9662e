package store

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
)

// lockLosses are ways to take the lock of a running host away.
var lockLosses = map[string]func(dir string) error{
	"the lock file": func(dir string) error { return os.Remove(filepath.Join(dir, pieceformat.LockFile)) },
	"another lock file": func(dir string) error {
		name := filepath.Join(dir, pieceformat.LockFile)
		return errors.Join(os.Remove(name), os.WriteFile(name, nil, 0o600))
	},
	"its directory": func(dir string) error { return os.RemoveAll(filepath.Join(dir, pieceformat.MetaDir)) },
	"its directory, renamed": func(dir string) error {
		return os.Rename(filepath.Join(dir, pieceformat.MetaDir), dir+".away")
	},
	"its directory, a link now": func(dir string) error {
		meta, away := filepath.Join(dir, pieceformat.MetaDir), filepath.Join(filepath.Dir(dir), "away")
		return errors.Join(os.Rename(meta, away), os.Symlink(away, meta))
	},
}

// TestLockIsLost takes the lock of a running host away. The host notices, no other host can start meanwhile, and what
// was stored is there afterwards, whether the host comes back by itself or is killed before.
func TestLockIsLost(t *testing.T) {
	for name, lose := range lockLosses {
		for _, killed := range []bool{false, true} {
			t.Run(name+map[bool]string{true: ", killed"}[killed], func(t *testing.T) {
				f := newFixture(t, filepath.Join(t.TempDir(), "root"), 40, 1, func(c *Config) { c.UpkeepEvery = time.Hour })
				f.mustPut(0, 1, 2)
				r := f.root()
				must(t, lose(r.Path))
				f.mustPut(3)
				if other, err := Open(context.Background(), f.cfg); !errors.Is(err, ErrRootBusy) {
					if err == nil {
						other.Close()
					}
					t.Fatalf("another host starts: %v", err)
				}
				if killed {
					f.kill()
					f.start()
				} else {
					if err := f.store.Maintain(t.Context(), 0, Probe); err != nil || r.Health.State() != health.Out {
						t.Fatalf("the root is %s, %v", r.Health.State(), err)
					}
					f.backIn()
					if other, err := Open(context.Background(), f.cfg); !errors.Is(err, ErrRootBusy) {
						if err == nil {
							other.Close()
						}
						t.Fatalf("another host starts later: %v", err)
					}
				}
				f.mustRead(upTo(4)...)
				f.mustPut(4)
				f.checkUsed()
				f.restart()
				f.mustRead(upTo(5)...)
			})
		}
	}
}

// TestLostLockIsNoticed: the root's own upkeep notices it within a second.
func TestLostLockIsNoticed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, t.TempDir(), 40, 1, func(c *Config) { c.Now = time.Now })
		defer f.store.Close()
		f.mustPut(0)
		must(t, lockLosses["its directory"](f.cfg.Roots[0].Path))
		time.Sleep(time.Second)
		synctest.Wait()
		if f.store.Stats().Roots[0].Outages == 0 {
			t.Fatal("not noticed in a second")
		}
		f.awaitState(0, health.In)
		f.mustRead(0)
	})
}

// leaving is a file system in which a root's directory is moved away just before its lock file is looked at.
type leaving struct {
	staging.FS
	root string
	left atomic.Bool
}

func (f *leaving) Stat(name string) (staging.Info, error) {
	if f.left.Load() && filepath.Base(name) == filepath.Base(pieceformat.LockFile) {
		if err := os.Rename(f.root, f.root+".away"); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return staging.Info{}, err
		}
	}
	return f.FS.Stat(name)
}

// TestDirectoryGoesMeanwhile: where the lock file is missing because the whole directory is, the report says so.
func TestDirectoryGoesMeanwhile(t *testing.T) {
	root := filepath.Join(t.TempDir(), "root")
	fsys := &leaving{FS: staging.OS(), root: root}
	f := newFixture(t, root, 40, 1, func(c *Config) { c.FS, c.UpkeepEvery = fsys, time.Hour })
	fsys.left.Store(true)
	must(t, f.store.Maintain(t.Context(), 0, Probe))
	if said := f.root().Health.Report().Reason; !strings.HasPrefix(said, "its directory is gone") {
		t.Errorf("the root is out because %s", said)
	}
}
