package store

import (
	"context"
	"errors"
	"fmt"

	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/store/shared"
)

// A root that cannot be opened with the others does not keep them from serving: it is out, and when its probes are due
// it is opened as at a start. Open fails when no root is left, and where waiting would not help.

// eachRoot does a part of opening with every root that is there.
func (s *Store) eachRoot(ctx context.Context, part func(*root) error) error {
	for _, r := range s.roots {
		if r.unavailable.Load() {
			continue
		}
		if err := part(r); err != nil {
			if err := s.openWithout(ctx, r, err); err != nil {
				return err
			}
		}
	}
	return nil
}

// openWithout leaves a root out because of an error, or returns the error when that must not be.
func (s *Store) openWithout(ctx context.Context, r *root, err error) error {
	r.reset()
	if ctx.Err() != nil || errors.Is(err, ErrRootBusy) || errors.Is(err, shared.ErrLinks) {
		return err
	}
	r.unavailable.Store(true)
	for _, o := range s.roots {
		if !o.unavailable.Load() {
			r.Health.TakeOut("it cannot be opened", err, "look after the device or the mount; the others serve")
			return nil
		}
	}
	return err
}

// reset gives up what opening has begun. Nobody else uses the root yet.
func (r *root) reset() {
	r.kind.leave()
	r.Lock()
	defer r.Unlock()
	_ = r.directory.Close() // what the lock protects is not used
	r.Quarantine.Reset()
	r.EndScan()
	r.Evictor.SetScanning(false)
	r.Account.Reset()
}

// openLate opens a root that was left out.
func (r *root) openLate(ctx context.Context) error {
	err := r.take(ctx)
	if err == nil {
		err = r.kept.loadNamespaces()
	}
	if err == nil {
		err = r.recover(ctx)
	}
	if err != nil {
		r.reset()
		return err
	}
	r.unavailable.Store(false)
	if r.IsScanning() {
		r.store.work.Go(func() { r.scanAll(r.store.run, nil) })
	}
	if err := (returning{r}).rejoin(ctx, health.Returning); err != nil {
		return fmt.Errorf("store: root %s, opened late: %w", r.Path, err)
	}
	return nil
}
