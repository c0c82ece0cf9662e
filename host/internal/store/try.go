package store

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
)

// Try fails as [Open] would at present, and leaves no trace in the roots. out are roots without which Open would begin, by
// their path.
func Try(ctx context.Context, cfg Config) (out map[string]error, err error) {
	s, err := prepare(ctx, cfg)
	if err != nil {
		return nil, err
	}
	out = map[string]error{}
	err = s.eachRoot(ctx, func(r *root) error {
		err := r.try(ctx)
		if err != nil {
			out[r.Path] = err
		}
		return err
	})
	for _, h := range s.cfg.Policies.Shadows {
		if err == nil {
			err = s.addShadow(ctx, h)
		}
	}
	return out, errors.Join(err, s.abandon())
}

// try fails as [root.take] would.
func (r *root) try(ctx context.Context) (err error) {
	defer func() {
		if err != nil && !errors.Is(err, ErrRootBusy) {
			err = fmt.Errorf("store: root %s: %w", r.Path, err)
		}
	}()
	bare, lock := r.Health.Bare(), r.Slash+r.file(pieceformat.LockFile)
	if r.cfg.NoDirectory {
		return nil
	}
	missing, err := health.TryRoot(bare, r.Path, r.cfg.RequireMount)
	if err != nil {
		return err
	}
	if err := r.apart(); err != nil || missing {
		return err
	}
	if err := unix.Access(r.Path, unix.W_OK|unix.X_OK); err != nil {
		return &fs.PathError{Op: "write to", Path: r.Path, Err: err}
	}
	var locks []io.Closer // of files that are there: none is made
	if _, err := bare.Stat(lock); err == nil {
		if locks, err = health.Lock(bare, r.Path, lock, !r.cfg.Shared, nil); err != nil {
			return r.notLocked(err)
		}
	}
	if _, serr := bare.Stat(r.Slash + pieceformat.LockFile); serr == nil {
		err = r.owner.lock(ctx)
		r.owner.leave()
	}
	return errors.Join(err, health.Unlock(locks))
}
