package store

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/bits"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/store/capacity"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/files"
	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/internal/store/moves"
)

// reserve implements [owner]. It evicts to make room. The turn must be held.
func (c *sole) reserve(ctx context.Context, w reservation) error {
	r := c.r
	// A request that cannot fit even in an empty root must not cost an entry.
	if err := r.Account.Possible(w.Want, r.IsScanning()); err != nil {
		return err
	}
	defer func() {
		if w.Taken > 0 { // nothing was booked
			w.reuseFor.release()
			r.Account.Remove(capacity.Orphans, w.Taken)
		}
	}()
	for {
		r.Lock()
		noSlot := w.slot && r.Index.Len() == r.Index.Max()
		short, ok := capacity.Shortage{}, false
		if !noSlot {
			short, ok = r.Account.Reserve(w.Want)
		} else {
			short = r.Account.Short(w.Want)
		}
		scanning, err := r.Scanning(), error(nil)
		if ok {
			err = w.booked(r)
		}
		r.Unlock()
		if ok {
			return err
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		if scanning {
			return fmt.Errorf("%w: %s is %d bytes short, and its scan may find more", ErrNoSpace, r.Path, short.Bytes)
		}
		if err := c.evict(&w, short, noSlot); err != nil {
			return err
		}
	}
}

// evict evicts a part of the bytes that a reservation lacks.
func (c *sole) evict(w *reservation, short capacity.Shortage, noSlot bool) error {
	r := c.r
	bytes, tenant := short.Bytes, abi.None
	if short.Quota > 0 {
		bytes, tenant = short.Quota, w.ID
	}
	got := c.evictSome(max(bytes, 1), tenant, w.reuseFor, w.spares)
	w.Taken += got.taken
	if got.freed > 0 || (noSlot || got.failed == nil) && got.entries > 0 { // entries that are being read free nothing yet, but others may
		return nil
	}
	switch {
	case got.behind:
		return moves.ErrBehind
	case got.failed != nil:
		// The bytes of these entries are still in use, and the next files could not be unlinked either.
		return fmt.Errorf("%w: %s is %d bytes short and victims' files cannot be unlinked: %w", ErrNoSpace, r.Path,
			bytes, got.failed)
	case short.Quota > 0:
		return r.Account.QuotaError(w.Want, short.Quota)
	case bytes > 0 && r.Quarantine.Shrink(bytes):
		return nil
	case noSlot:
		return fmt.Errorf("%w: all %d slots of %s are taken and no entry can be evicted", ErrNoSpace,
			r.Index.Max(), r.Path)
	}
	return fmt.Errorf("%w: %s is %d bytes short and no entry can be evicted", ErrNoSpace, r.Path, bytes)
}

// evicted is the result of a round of eviction.
type evicted struct {
	entries int
	freed   int64 // freed bytes; an entry with files that could not be unlinked frees none
	taken   int64 // bytes of the file that was left to a put, booked as an orphan
	failed  error // why a file could not be unlinked
	behind  bool  // the remaining entries have no copy in the next level yet
}

// evictSome evicts entries that the policy names, until the given bytes are freed. The turn must be held. If tenant is not None,
// only entries of the tenant are evicted. reuseFor may get one of the files. If there is a next level and spares is not 0,
// entries without a copy there and with at least spares hits stay.
func (c *sole) evictSome(bytes int64, tenant uint32, reuseFor *Put, spares uint32) (got evicted) {
	r := c.r
	r.Lock()
	list, behind := r.leaving.Evict(c.victims[:0], bytes, tenant, spares)
	got.behind = behind
	c.victims = list
	r.Unlock()
	if len(list) == 0 {
		return got
	}
	var left int64
	offered := reuseFor != nil && reuseFor.temp == ""
	for i := range list {
		v := &list[i]
		n, stays, err := c.unlinkVictim(v, c.offerFile(v, reuseFor))
		if left += n; err != nil && got.failed == nil {
			got.failed = err
		}
		if stays {
			r.Lock()
			r.Revive(v)
			r.Unlock()
			v.Slot = index.None
		}
	}
	r.Lock()
	defer r.Unlock()
	for i := range list {
		if list[i].Slot == index.None {
			continue
		}
		got.entries++
		got.freed += r.Index.Bytes(list[i].Slot)
		r.FinishEvict(&list[i])
	}
	r.Count.Evictions += uint64(got.entries)
	if r.offers() {
		r.level.replaced(got.freed)
	}
	if offered && reuseFor.temp != "" { // the file exists before the put's bytes are reserved
		got.taken = reuseFor.class.FileBytes()
		r.Account.Add(capacity.Orphans, got.taken)
	}
	got.freed = max(0, got.freed-left)
	return got
}

func (c *sole) unlink(v *entries.Eviction, pieces uint64) (left int64, failed error) {
	for rank := range entries.Ranks(pieces) {
		n, err := c.r.Remove(c.r.victim(v, rank), v.Class.FileBytes())
		if c.vanished(err); err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, files.ErrRead) {
			failed = err
		}
		left += n
	}
	return left, failed
}

// vanished counts a file that another program has removed.
func (c *sole) vanished(err error) {
	if errors.Is(err, fs.ErrNotExist) {
		c.r.Counted(&c.r.Count.Vanished)
	}
}

// unlinkVictim is unlink for a victim. If not even the first file can be unlinked, the whole victim stays, since its bytes
// would not be freed.
func (c *sole) unlinkVictim(v *entries.Eviction, pieces uint64) (left int64, stays bool, failed error) {
	if pieces != 0 && pieces == v.Pieces {
		err := c.r.Unlink(c.r.victim(v, uint32(bits.TrailingZeros64(pieces))))
		c.vanished(err)
		switch {
		case err == nil, errors.Is(err, fs.ErrNotExist):
			pieces &= pieces - 1
		case errors.Is(err, files.ErrRead): // its bytes stay in the account until the reader is done
		case health.Judge(err) != health.Unanswered: // otherwise it may still be removed
			return 0, true, err
		}
	}
	left, failed = c.unlink(v, pieces)
	return left, false, failed
}

// A put that evicts takes over the file of a victim if possible: the file is renamed to the temporary of the put and
// overwritten in place. This saves an unlink, a create and the allocation of blocks, which cost more than the write. A victim
// has no pins, so its file is not open in this process. A file identifies its piece in the header, so whatever a power failure
// leaves under the victim's name is a miss. Only a root with a sole owner does this: in a shared root, another host may be
// reading the victim.

// offerFile turns the file of one of a victim's pieces into the temporary of the put, if the file may have the right size. It
// returns the pieces with files that must still be unlinked. The turn must be held, and the root's lock must not.
func (c *sole) offerFile(v *entries.Eviction, reuseFor *Put) (left uint64) {
	r := c.r
	if reuseFor == nil || reuseFor.temp != "" || r.cfg.WriteOnce || v.Pieces == 0 || reuseFor.isStored() ||
		v.Class.FileBytes() != reuseFor.class.FileBytes() {
		return v.Pieces
	}
	bit := v.Pieces & -v.Pieces
	name := r.victim(v, uint32(bits.TrailingZeros64(bit)))
	temp := r.store.seq.TempName(reuseFor.target)
	if err := r.InDir(reuseFor.target, func() error { return r.FS.Rename(name, temp) }); err != nil {
		if !health.Judge(err).Untouched() { // otherwise the rename may have succeeded in spite of the error
			r.Orphans.AddLate(temp, err)
			r.Discard(temp, 0) // if the state is unknown, the file counts under its old name
		}
		return v.Pieces
	}
	r.Leave(name)
	reuseFor.temp = temp
	return v.Pieces &^ bit
}
