package store

import (
	"fmt"

	"github.com/kvhost/kvhost/host/internal/store/shared"
	"github.com/kvhost/kvhost/staging"
)

// guard makes a file that fails with [shared.ErrFenced] once its put's credit is void. The file has no name then, and
// nobody counts what is written to it.
func (r *sharedRoot) guard(f staging.File, credit shared.Credit) staging.File {
	return &guarded{File: f, root: r, credit: credit}
}

// guarded is a temporary that is being written.
type guarded struct {
	staging.File
	root   *sharedRoot
	credit shared.Credit
}

func (g *guarded) check() error {
	if !g.root.member.Holds(g.credit) {
		return fmt.Errorf("writing %s: %w", g.Name(), shared.ErrFenced)
	}
	return nil
}

// WriteAt implements [staging.File].
func (g *guarded) WriteAt(p []byte, off int64) (int, error) {
	if err := g.check(); err != nil {
		return 0, err
	}
	return g.File.WriteAt(p, off)
}

// Allocate implements [staging.File].
func (g *guarded) Allocate(n int64) error {
	if err := g.check(); err != nil {
		return err
	}
	return g.File.Allocate(n)
}
