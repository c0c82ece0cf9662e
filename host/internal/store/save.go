package store

import (
	"context"
	"fmt"

	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
)

// A checkpoint is written only if the account is exact: nothing is in flight, no entry is being evicted, there is no orphan,
// the scan at the start has ended, and the root is in service and not shared. All changes that led to this state must be on the
// disk. Otherwise the names of unlinked files could return after a power failure without being in any account.

// unsettled returns the reason why the account is not exact, or an empty string. The lock must be held.
func (r *recovery) unsettled() (why string) {
	s := r.set
	switch {
	case s.Scanning():
		return "the scan at the start has not ended"
	case s.InFlight() > 0:
		return "entries are in flight"
	case s.Account.Figures().Orphans != 0:
		return "files would not go"
	case !r.kept.Health.Serves():
		return "the root is out"
	}
	s.Index.Each(func(_ uint32, e *index.Entry) {
		switch {
		case e.Any(index.Evicting | index.Detached):
			why = "entries are being evicted"
		case e.Is(index.Listed):
			why = "heads of listed entries are to be read"
		}
	})
	return why
}

// saveCheckpoint writes the index and the state of the evict policy, if the account is exact. Nothing else may use the root any
// more. It takes the lock.
func (r *recovery) saveCheckpoint() {
	s, d := r.set, r.kept
	s.Lock()
	defer s.Unlock()
	if why := r.unsettled(); why != "" {
		d.Log.Info("checkpoint not written; the next start scans", "because", why)
		return
	}
	when := d.Sequence.Stamp()
	err := d.FS.SyncFS(d.Path)
	if err == nil {
		err = r.saveState(when)
	}
	if err == nil {
		err = d.Replace(pieceformat.CheckpointFile, func(f staging.File) error {
			return writeCheckpoint(f, s.Index, when, d.owners(s.Index))
		})
	}
	if err != nil {
		d.Log.Warn("checkpoint not written; the next start scans", "error", err)
	}
}

// saveState writes the state of the evict policy. It does not write it while there are pins, because the next run starts
// without any. The lock must be held.
func (r *recovery) saveState(when int64) error {
	r.kept.removeState()
	if r.set.Index.Held() > 0 {
		return nil
	}
	limit := uint32(min(pieceformat.MaxState, 1<<20+256*int64(r.set.Index.High())))
	s, ok, err := r.set.Evictor.Save(limit)
	if err != nil {
		r.kept.Log.Warn("evict policy's state not kept; the next start tells it every entry", "error", err)
	}
	if err != nil || !ok {
		return nil
	}
	return r.kept.saveState(s, when)
}

// takeCheckpoint restores the entries and the state of the evict policy from a valid checkpoint, if there is one. It takes the
// lock.
func (r *recovery) takeCheckpoint(ctx context.Context) (ok bool, err error) {
	s, d := r.set, r.kept
	x := index.New(s.Index.Max(), d.Catalog.Fingerprint, d.Catalog.Base)
	when, ok, err := d.takeCheckpoint(x)
	if err != nil {
		return false, fmt.Errorf("store: %w", err)
	}
	if !ok {
		return false, nil
	}
	d.Sequence.StampsFrom(when)
	state := d.loadState(when)
	s.Lock()
	defer s.Unlock()
	s.Restore(x)
	s.Evictor.Resume(ctx, state)
	return true, nil
}
