package store

import (
	"cmp"
	"errors"
	"io/fs"
	"slices"

	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
)

// The order of last touch outlives the host: a list of fingerprints, written at a clean end and from time to time. It
// is a hint. After a crash it holds for those of its entries that the scan finds, and everything stored since is newer.
// Without a list the order of storing is used. After a crash the policy does not get its slots and its state back: it
// is told of the entries in the order of the list.

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

// foundEntry is an entry that a scan found and that nobody has touched since.
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
