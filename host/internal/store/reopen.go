package store

import (
	"context"
	"errors"
	"fmt"
	"math"

	"github.com/kvhost/kvhost/host/internal/s3fs"
	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/internal/store/shared"
)

// A root that was out of service returns in the steps of [health.Monitor].Reopen. This file has the root's own part: it removes
// files that could not be unlinked, drops entries with files that gave no answer, and writes the texts of namespaces that were
// opened in between.

// returning is a root that is on its way back into service. It implements [health.Root].
type returning struct{ *root }

// checkHealth is the health part of the upkeep. It notices that the directory is gone, and returns the root to service.
func (r *root) checkHealth(ctx context.Context) {
	if r.Health.Serves() && !r.directory.Present() || r.Health.Takes() {
		return
	}
	r.Health.Check(ctx, returning{r})
}

func (r returning) Probe() (empty bool, err error) {
	if r.unavailable.Load() {
		return false, nil // openLate examines the root as at a start
	}
	if empty, err = r.identify(); err != nil {
		return false, err
	}
	if err = r.directory.Probe(r.store.seq.TempName(r.Path + "/" + pieceformat.MetaDir + "/probe")); err == nil && !empty {
		err = r.refused(index.None)
	}
	return empty, err
}

func (r returning) Reopen(ctx context.Context, from health.State, empty bool) error {
	if r.unavailable.Load() {
		return r.openLate(ctx)
	}
	if from == health.Returning {
		if err := r.refit(ctx, empty); err != nil {
			return err
		}
	}
	return r.rejoin(ctx, from)
}

// refit brings the root up to date before it serves again.
func (r returning) refit(ctx context.Context, empty bool) error {
	r.ForgetDirs()
	lost := r.suspects.take()
	if empty {
		lost = r.Marks()
	}
	for i, m := range lost {
		if err := ctx.Err(); err != nil {
			r.suspects.add(lost[i:]...)
			return err
		}
		r.drop(m)
	}
	if empty {
		r.Quarantine.Shrink(math.MaxInt64)
	}
	r.Orphans.Retry(ctx)
	return nil
}

// rejoin writes the texts of namespaces that were opened during the outage, and puts the root in service before others can be
// opened.
func (r returning) rejoin(ctx context.Context, from health.State) error {
	if err := r.store.catalog.Lock(ctx); err != nil {
		return err
	}
	defer r.store.catalog.Unlock()
	if err := r.store.catalog.Files(r.kept.Keep); err != nil {
		return err
	}
	r.Account.Lift() // otherwise the root would be in service but take an entry only in place of another
	if !r.Health.Promote(from, health.In) {
		return ErrRootOut
	}
	countCopies(r.store) // its entries may have been stored elsewhere in between
	return nil
}

// A root that cannot be opened at the start does not keep the other roots from serving. It is out of service, and when its
// probes are due, it is opened as at a start. Open fails only if no root is left, or if waiting would not help.

// eachRoot runs one step of opening for every available root.
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

// openWithout leaves out a root because of an error. It returns the error if the store cannot be opened without the root.
func (s *Store) openWithout(ctx context.Context, r *root, err error) error {
	r.reset()
	if ctx.Err() != nil || errors.Is(err, ErrRootBusy) || errors.Is(err, ErrConfig) || errors.Is(err, shared.ErrLinks) ||
		errors.Is(err, s3fs.ErrConditions) {
		return err
	}
	r.unavailable.Store(true)
	for _, o := range s.roots {
		if !o.unavailable.Load() {
			r.Health.OutAtOpening(err)
			return nil
		}
	}
	return err
}

// reset undoes the steps of opening. Nothing else may use the root yet.
func (r *root) reset() {
	r.owner.leave()
	r.Lock()
	defer r.Unlock()
	_ = r.directory.Close() // nothing uses the root that the lock protects
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
