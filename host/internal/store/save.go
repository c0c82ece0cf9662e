package store

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"time"

	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
)

// A checkpoint is written only when the account is exact: nothing in flight, no entry being evicted, no orphan, the
// scan at the start finished, the root in use and not shared. And only when all that led to it is on disk: after a
// power failure the names of files that were unlinked would come back, and be in no account.

// unsettled says why the account is not exact, if it is not. The lock is held.
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
		if e.Any(index.Evicting | index.Detached) {
			why = "entries are being evicted"
		}
	})
	return why
}

// saveCheckpoint writes the index and the evict policy's state, if the account is exact. Nothing else uses the root any
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

// saveState writes the state of the acting policy. Pins are no part of what the next run begins with. The lock is held.
func (r *recovery) saveState(when int64) error {
	r.kept.removeState()
	if r.pinned() {
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

func (r *recovery) pinned() (any bool) {
	r.set.Index.Each(func(_ uint32, e *index.Entry) { any = any || e.Pins() > 0 })
	return any
}

// takeCheckpoint enters the checkpoint, if there is one that holds, and the evict policy's state. It takes the lock.
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

// touchesEvery is how often the list of touches is written.
const touchesEvery = 5 * time.Minute

// saveTouches writes the list of touches. It takes the lock for a tenth of a millisecond at a time.
func (r *recovery) saveTouches() {
	when := r.kept.Sequence.Stamp() // what is stored from now on is newer
	order := r.set.Evictor.Snapshot()
	err := r.kept.replace(pieceformat.TouchesFile, func(f staging.File) error {
		return pieceformat.WriteTouches(f, when, len(order), func(i int) uint64 { return order[i].Fingerprint })
	})
	if err != nil {
		r.kept.Log.Warn("order of last touch not kept", "error", err)
	}
}

// saveTouchesEvery writes the list periodically, if it has changed, until ctx ends.
func (r *recovery) saveTouchesEvery(ctx context.Context, every time.Duration) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for last := uint32(0); ; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		r.set.Lock()
		now, scanning := r.set.Index.Clock(), r.set.Scanning()
		r.set.Unlock()
		if now != last && !scanning && r.kept.Health.Takes() { // during a scan the last run's list is still to be read
			last = now
			r.saveTouches()
		}
	}
}

// loadTouches returns the place of each slot in the list, from 1 on, and the time of the list; nil when there is no
// list. It takes the lock.
func (r *recovery) loadTouches() (place []uint64, when int64) {
	s := r.set
	s.Lock()
	place = make([]uint64, s.Index.High())
	s.Unlock()
	n := uint64(1)
	when, ok := r.kept.loadTouches(func(fingerprints []uint64) {
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

// The order of last touch outlives the host: a list of fingerprints, written at a clean end and from time to time. It
// is a hint. After a crash it holds for those of its entries that the scan finds, and everything stored since is newer.
// Without a list the order of storing is used. After a crash the policy does not get its slots and its state back: it
// gets the entries in the order of the list.

// loadTouches calls visit with the fingerprints of the list, a part at a time, and returns its time. ok is false when
// there is no list that holds: forget what visit was given.
func (d *keptDir) loadTouches(visit func(fingerprints []uint64)) (when int64, ok bool) {
	err := d.read(pieceformat.TouchesFile, func(f staging.File, size int64) (err error) {
		when, err = pieceformat.ReadTouches(f, size, visit)
		return err
	})
	if err == nil {
		return when, true
	}
	if !errors.Is(err, fs.ErrNotExist) {
		d.Log.Warn("list of touches not used: the order of storing is used instead", "error", err)
	}
	return 0, false
}

// foundEntry is an entry that a scan found and that was not touched since.
type foundEntry struct {
	Slot  uint32
	Place uint64 // in the list of touches, from 1 on; 0: it is not there, or was stored later
	Time  int64  // the newest store time of its pieces
}

// byLastTouch sorts entries from the least recently touched on: those of the list in its order, then the others by
// store time.
func byLastTouch(list []foundEntry) {
	slices.SortFunc(list, func(a, b foundEntry) int {
		// Place 0 wraps to the largest number: behind everything that has a place.
		return cmp.Or(cmp.Compare(a.Place-1, b.Place-1), cmp.Compare(a.Time, b.Time), cmp.Compare(a.Slot, b.Slot))
	})
}
