package store

import (
	"context"
	"time"

	"github.com/kvhost/kvhost/host/store/index"
)

const touchesEvery = 5 * time.Minute

// saveTouches writes the list of touches. It holds the root's lock for a tenth of a millisecond at a time.
func (r savedIndex) saveTouches() {
	when := r.store.seq.Stamp() // what is stored from now on is newer
	order := r.Evictor.Snapshot()
	if err := r.kept.SaveTouches(when, len(order), func(i int) uint64 { return order[i].Fingerprint }); err != nil {
		r.Log.Warn("order of last touch not kept", "error", err)
	}
}

// saveTouchesEvery writes the list periodically, if it has changed, until ctx ends.
func (r savedIndex) saveTouchesEvery(ctx context.Context, every time.Duration) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for last := uint32(0); ; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		r.Lock()
		now, scanning := r.Index.Clock(), r.Scanning()
		r.Unlock()
		if now != last && !scanning && r.Health.Takes() { // while a scan is under way the last run's list is still to be read
			last = now
			r.saveTouches()
		}
	}
}

// loadTouches returns the place of each slot in the list, from 1 on, and the time of the list; nil when there is no
// list.
func (r savedIndex) loadTouches() (place []uint64, when int64) {
	r.Lock()
	place = make([]uint64, r.Index.High())
	r.Unlock()
	n := uint64(1)
	when, ok := r.kept.LoadTouches(func(fingerprints []uint64) {
		r.Lock()
		defer r.Unlock()
		for _, fp := range fingerprints {
			if slot := r.Index.FindFingerprint(fp); slot != index.None && int(slot) < len(place) {
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
