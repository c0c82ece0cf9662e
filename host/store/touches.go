package store

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"time"

	"github.com/kvhost/kvhost/host/store/index"
	"github.com/kvhost/kvhost/host/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
)

// The order of last touch outlives the host: a list of fingerprints, written at a clean end and every touchesEvery. It
// is a hint. After a crash it holds for those of its entries that the scan finds, and everything stored since is newer.
// Without a list the order of storing is used. After a crash the policy does not get its slots and its state back: it
// is told of the entries in the order of the list.
const touchesEvery = 5 * time.Minute

// saveTouches writes the list. It holds the root's lock for a tenth of a millisecond at a time.
func (r *root) saveTouches() {
	name := r.dir + "/" + pieceformat.TouchesFile
	temp := r.store.tempName(name)
	err := r.writeTouches(temp)
	if err == nil {
		err = r.fs.Rename(temp, name)
	}
	if err != nil {
		_ = r.fs.Remove(temp)
		r.log.Warn("the order of last touch could not be kept", "error", err)
	}
}

// saveTouchesEvery writes the list periodically, if it has changed, until ctx ends.
func (r *root) saveTouchesEvery(ctx context.Context, every time.Duration) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for last := uint32(0); ; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		r.mu.Lock()
		now, scanning := r.x.Clock(), r.scanning
		r.mu.Unlock()
		if now != last && !scanning && r.health.Takes() { // while a scan is under way the last run's list is still to be read
			last = now
			r.saveTouches()
		}
	}
}

func (r *root) writeTouches(name string) (err error) {
	f, err := r.fs.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	when := r.store.stamp() // what is stored from now on is newer
	order := r.evictor.Snapshot()
	if err := pieceformat.WriteTouches(f, when, len(order), func(i int) uint64 { return order[i].Fingerprint }); err != nil {
		return err
	}
	return f.Datasync()
}

// loadTouches returns the place of each slot in the list, from 1 on, and the time of the list; nil when there is no
// list.
func (r *root) loadTouches() (place []uint64, when int64) {
	f, err := r.fs.OpenFile(r.dir+"/"+pieceformat.TouchesFile, os.O_RDONLY, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, 0
	}
	if err == nil {
		defer f.Close()
		r.mu.Lock()
		place = make([]uint64, r.x.High())
		r.mu.Unlock()
		when, err = r.readTouches(f, place)
	}
	if err != nil {
		r.log.Warn("the order of last touch could not be read; the order of storing serves", "error", err)
		return nil, 0
	}
	return place, when
}

func (r *root) readTouches(f staging.File, place []uint64) (when int64, err error) {
	info, err := f.Stat()
	if err != nil {
		return 0, err
	}
	n := uint64(1)
	return pieceformat.ReadTouches(f, info.Size, func(fingerprints []uint64) {
		r.mu.Lock()
		defer r.mu.Unlock()
		for _, fp := range fingerprints {
			if slot := r.x.FindFingerprint(fp); slot != index.None && int(slot) < len(place) {
				place[slot] = n
			}
			n++
		}
	})
}
