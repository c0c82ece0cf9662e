package recovery

import (
	"context"
	"fmt"
	"time"

	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
)

// A checkpoint is written only when the account is exact: nothing in flight, no entry being evicted, no orphan, the
// scan at the start finished, the root in use and not shared. And only when all that led to it is on disk: after a
// power failure the names of files that were unlinked would come back, and be in nobody's account.

// unsettled says why the account is not exact, if it is not. The lock is held.
func (r *Root) unsettled() (why string) {
	s := r.Entries
	switch {
	case s.Scanning():
		return "the scan at the start has not ended"
	case s.InFlight() > 0:
		return "entries are in flight"
	case s.Account.Figures().Orphans != 0:
		return "files would not go"
	case !r.Kept.Health.Serves():
		return "the root is out"
	}
	s.Index.Each(func(_ uint32, e *index.Entry) {
		if e.Any(index.Evicting | index.Detached) {
			why = "entries are being evicted"
		}
	})
	return why
}

// SaveCheckpoint writes the index and the evict policy's state, if the account is exact. Nothing else uses the root any
// more. It takes the lock.
func (r *Root) SaveCheckpoint() {
	s, d := r.Entries, r.Kept
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
		err = d.SaveCheckpoint(s.Index, when)
	}
	if err != nil {
		d.Log.Warn("checkpoint not written; the next start scans", "error", err)
	}
}

// saveState writes the state of the acting policy. Pins are no part of what the next run begins with. The lock is held.
func (r *Root) saveState(when int64) error {
	r.Kept.removeState()
	if r.pinned() {
		return nil
	}
	limit := uint32(min(pieceformat.MaxState, 1<<20+256*int64(r.Entries.Index.High())))
	s, ok, err := r.Entries.Evictor.Save(limit)
	if err != nil {
		r.Kept.Log.Warn("evict policy's state not kept; the next start tells it every entry", "error", err)
	}
	if err != nil || !ok {
		return nil
	}
	return r.Kept.saveState(s, when)
}

func (r *Root) pinned() (any bool) {
	r.Entries.Index.Each(func(_ uint32, e *index.Entry) { any = any || e.Pins() > 0 })
	return any
}

// TakeCheckpoint enters the checkpoint, if there is one that holds, and the evict policy's state. It takes the lock.
func (r *Root) TakeCheckpoint(ctx context.Context) (ok bool, err error) {
	s, d := r.Entries, r.Kept
	x := index.New(s.Index.Max(), d.Catalog.Fingerprint, d.Catalog.Base)
	when, ok, err := d.TakeCheckpoint(x)
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

// TouchesEvery is how often the list of touches is written.
const TouchesEvery = 5 * time.Minute

// SaveTouches writes the list of touches. It takes the lock for a tenth of a millisecond at a time.
func (r *Root) SaveTouches() {
	when := r.Kept.Sequence.Stamp() // what is stored from now on is newer
	order := r.Entries.Evictor.Snapshot()
	if err := r.Kept.SaveTouches(when, len(order), func(i int) uint64 { return order[i].Fingerprint }); err != nil {
		r.Kept.Log.Warn("order of last touch not kept", "error", err)
	}
}

// SaveTouchesEvery writes the list periodically, if it has changed, until ctx ends.
func (r *Root) SaveTouchesEvery(ctx context.Context, every time.Duration) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for last := uint32(0); ; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		r.Entries.Lock()
		now, scanning := r.Entries.Index.Clock(), r.Entries.Scanning()
		r.Entries.Unlock()
		if now != last && !scanning && r.Kept.Health.Takes() { // during a scan the last run's list is still to be read
			last = now
			r.SaveTouches()
		}
	}
}

// loadTouches returns the place of each slot in the list, from 1 on, and the time of the list; nil when there is no
// list. It takes the lock.
func (r *Root) loadTouches() (place []uint64, when int64) {
	s := r.Entries
	s.Lock()
	place = make([]uint64, s.Index.High())
	s.Unlock()
	n := uint64(1)
	when, ok := r.Kept.loadTouches(func(fingerprints []uint64) {
		s.Lock()
		defer s.Unlock()
		for _, fp := range fingerprints {
			if slot := s.Index.FindFingerprint(fp); slot != index.None && int(slot) < len(place) {
				place[slot] = n
			}
			n++
		}
	})
	if !ok {
		return nil, 0
	}
	return place, when
}
