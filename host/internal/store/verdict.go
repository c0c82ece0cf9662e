package store

import (
	"errors"
	"fmt"
	"io/fs"
	"math"

	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
)

// A condition of the process, the device or the file system must never count against an entry. [health.Judge] classifies an
// error. If the error may concern either the file or its whole root, other files of the root are read to decide.

// unopened decides about an error of opening the file of a rank. After a temporary condition the entry stays. After any other
// error it is dropped, so that the next lookup misses. Otherwise it would be granted and fail again and again.
func (r *root) unopened(m entries.Mark, rank uint32, name string, err error) error {
	switch {
	case health.Judge(err) == health.Gone:
		if !r.directory.Present() {
			return fmt.Errorf("%w: %w", ErrRootOut, err) // all entries of the root are affected
		}
		r.Counted(&r.Count.Vanished)
		r.drop(m)
	case r.spares(m, name, err):
		return err
	default:
		r.dropDamaged(m, rank, name, err)
	}
	return fmt.Errorf("%w: %w", ErrGone, err)
}

// spares reports whether an error with the file of an entry says nothing about the entry. An entry without an answer is dropped
// before the root returns to service. A file that was refused or could not be read is read again. It counts as bad only if it
// fails both before and after another file of the root is read successfully, since a condition of the whole root may end
// between the two.
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
		case health.Device, health.Gone: // for example a stale handle
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

// reads returns an error if a file cannot be read to its end.
func (r *root) reads(name string) error {
	return health.ReadThrough(r.Health.Bare(), name, math.MaxInt64)
}

// refused returns an error if no file of the root may be opened. The file of the given slot is not considered.
func (r *root) refused(but uint32) error {
	if err := r.unreadable(but); health.Judge(err) == health.Refused {
		return err
	}
	return nil
}

// sampled is the number of files that are read to decide whether a root can be read.
const sampled = 3

// unreadable returns an error if none of a few sampled files of the root can be read. The file of the given slot is not
// considered. If there are no files, the lock file is read.
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

// sample returns the files of a few entries that are far apart in the index. The given slot is left out.
func (r *root) sample(but uint32) (names []string) {
	r.Lock()
	defer r.Unlock()
	high := r.Index.High()
	if high == 0 {
		return nil
	}
	for i := range uint32(sampled) { // each from its own part of the index
		for n := range min(high/sampled+1, 1<<12) {
			slot := uint32((uint64(but) + 1 + uint64(i*(high/sampled)+n)) % uint64(high))
			if name := r.pieceOf(slot); slot != but && name != "" {
				names = append(names, name)
				break
			}
		}
	}
	return names
}
