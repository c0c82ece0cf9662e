package store

import (
	"fmt"

	"github.com/kvhost/kvhost/host/policy"
	"github.com/kvhost/kvhost/host/store/index"
	"github.com/kvhost/kvhost/host/store/pieceformat"
)

// A checkpoint is written only when the account is exact: nothing in flight, no entry being evicted, no orphan, the
// scan at the start finished, the root in use and not shared. And only when all that led to it is on disk: after a
// power failure the names of files that were unlinked would come back, and be in nobody's account.

// savedIndex is what a root of one's own keeps of its index between runs: the checkpoint, the evict policy's state and
// the order of touch.
type savedIndex struct{ *root }

// unsettled says why the account is not exact, if it is not. mu is held.
func (r savedIndex) unsettled() string {
	switch {
	case r.Scanning():
		return "the scan at the start has not ended"
	case r.InFlight() > 0:
		return "entries are in flight"
	case r.Account.Figures().Orphans != 0:
		return "files would not go"
	case !r.Health.Serves():
		return "the root is out"
	}
	return ""
}

// saveCheckpoint writes the index and the evict policy's state, if the account is exact. Nothing else uses the root any
// more.
func (r savedIndex) saveCheckpoint() {
	r.Lock()
	defer r.Unlock()
	why := r.unsettled()
	r.Index.Each(func(_ uint32, e *index.Entry) {
		if e.Any(index.Evicting | index.Detached) {
			why = "entries are being evicted"
		}
	})
	if why != "" {
		r.Log.Info("checkpoint not written; the next start scans", "because", why)
		return
	}
	when := r.store.seq.Stamp()
	err := r.FS.SyncFS(r.Path)
	if err == nil {
		err = r.saveState(when)
	}
	if err == nil {
		err = r.kept.SaveCheckpoint(r.Index, when)
	}
	if err != nil {
		r.Log.Warn("checkpoint not written; the next start scans", "error", err)
	}
}

// saveState writes the state of the acting policy. Pins are no part of what the next run begins with. The caller holds
// mu.
func (r savedIndex) saveState(when int64) error {
	r.kept.RemoveState()
	if r.pinned() {
		return nil
	}
	s, ok, err := r.Evictor.Save(uint32(min(pieceformat.MaxState, 1<<20+256*int64(r.Index.High()))))
	if err != nil {
		r.Log.Warn("evict policy's state not kept; the next start tells it every entry", "error", err)
	}
	if err != nil || !ok {
		return nil
	}
	return r.kept.SaveState(s, when)
}

func (r savedIndex) pinned() (any bool) {
	r.Index.Each(func(_ uint32, e *index.Entry) { any = any || e.Pins() > 0 })
	return any
}

// takeCheckpoint enters the checkpoint, if there is one that holds, and returns the evict policy's state.
func (r savedIndex) takeCheckpoint() (state policy.State, ok bool, err error) {
	x := index.New(r.cfg.MaxEntries, r.store.catalog.Fingerprint, r.store.catalog.Base)
	when, ok, err := r.kept.TakeCheckpoint(x)
	if err != nil {
		return state, false, fmt.Errorf("store: %w", err)
	}
	if !ok {
		return state, false, nil
	}
	r.Lock()
	defer r.Unlock()
	r.Restore(x)
	r.store.seq.StampsFrom(when)
	return r.kept.LoadState(when), true, nil
}
