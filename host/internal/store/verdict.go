package store

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"math/bits"

	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
)

// A condition of the process, the device or the file system is never a verdict on an entry. [health.Judge] says of what an
// error speaks. Where that may be the file alone, or all of its root, other files of the root decide.

// unopened judges an error of opening the file of a rank. After a condition that passes the entry is as it was. After any
// other error it would be promised, and fail, again and again: it is dropped, so that the next lookup misses.
func (r *root) unopened(m entries.Mark, rank uint32, name string, err error) error {
	switch {
	case health.Judge(err) == health.Gone:
		if !r.directory.Present() {
			return fmt.Errorf("%w: %w", ErrRootOut, err) // all of it is
		}
		r.Counted(&r.Count.Vanished)
		r.drop(m, 0)
	case r.spares(m, name, err):
		return err
	default:
		r.dropDamaged(m, rank, name, err)
	}
	return fmt.Errorf("%w: %w", ErrGone, err)
}

// spares says that an error of using an entry's file is no verdict on the entry. What gave no answer is dropped before the
// root returns. A file that was refused, or could not be read, is tried again: the verdict is its own only if it fails
// before and after another file of the root is read, since a condition of all may end between the two.
func (r *root) spares(m entries.Mark, name string, err error) bool {
	switch c := health.Judge(err); {
	case c == health.Unanswered:
		if health.Hung(err) {
			r.suspects.add(m)
		}
		return true
	case c.MayBeOneFile(), errors.Is(err, staging.ErrAlign):
		again := r.reads(name)
		switch health.Judge(again) {
		case health.Refused:
			if err := r.refused(m.Slot); err != nil {
				r.Health.TakeOut("its files may not be opened", err, "give kvhost its right to read them back")
				return true
			}
		case health.Device, health.Gone: // as a handle that is stale
			if !errors.Is(again, fs.ErrNotExist) && r.unreadable(m.Slot) != nil {
				return true
			}
		default:
			return true
		}
		return !health.Judge(r.reads(name)).MayBeOneFile()
	default:
		return c.Untouched()
	}
}

// reads says why a file cannot be read through, if so.
func (r *root) reads(name string) error {
	return health.ReadThrough(r.Health.Bare(), name, math.MaxInt64)
}

// refused says why no file of the root may be opened, but perhaps that of one slot, if so.
func (r *root) refused(but uint32) error {
	if err := r.unreadable(but); health.Judge(err) == health.Refused {
		return err
	}
	return nil
}

// sampled is how many files tell whether a root's can be read.
const sampled = 3

// unreadable says why no file of the root can be read, but perhaps that of one slot, if so. A few tell, and where there are
// none the lock file.
func (r *root) unreadable(but uint32) (err error) {
	names := r.sample(but)
	for _, name := range names {
		if err = health.ReadThrough(r.Health.Bare(), name, pieceformat.Page); err == nil {
			return nil
		}
	}
	if len(names) == 0 {
		err = r.directory.Readable()
	}
	return err
}

// sample is the files of a few entries, far from each other in the index, but not that of one slot.
func (r *root) sample(but uint32) (names []string) {
	r.Lock()
	defer r.Unlock()
	high := r.Index.High()
	if high == 0 {
		return nil
	}
	for i := range uint32(sampled) { // each in a part of its own
		for n := range min(high/sampled+1, 1<<12) {
			slot := uint32((uint64(but) + 1 + uint64(i*(high/sampled)+n)) % uint64(high))
			e := r.Index.At(slot)
			if pieces := r.Index.Pieces(slot); slot != but && pieces != 0 && e.Is(index.Live) &&
				!e.Any(index.Evicting|index.Detached) {
				v := entries.Eviction{Class: r.ClassOf(slot), Key: r.Index.Key(slot), Names: r.Index.NamesOf(slot)}
				names = append(names, r.victim(&v, uint32(bits.TrailingZeros64(pieces))))
				break
			}
		}
	}
	return names
}
