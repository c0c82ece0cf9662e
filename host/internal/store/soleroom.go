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

// reserve implements [owner]: it evicts to make room. The caller holds the turn.
func (c *sole) reserve(ctx context.Context, w reservation) error {
	r := c.r
	// What cannot fit, whatever is evicted, costs no entry.
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

// evict evicts a part of what a reservation is short of.
func (c *sole) evict(w *reservation, short capacity.Shortage, noSlot bool) error {
	r := c.r
	bytes, tenant := short.Bytes, abi.None
	if short.Quota > 0 {
		bytes, tenant = short.Quota, w.ID
	}
	got := c.evictSome(max(bytes, 1), tenant, w.reuseFor, w.spares)
	w.Taken += got.taken
	if got.freed > 0 || (noSlot || got.failed == nil) && got.entries > 0 { // what is being read frees nothing yet, others may
		return nil
	}
	switch {
	case got.behind:
		return moves.ErrBehind
	case got.failed != nil:
		// Their bytes are still taken, and the next ones' would be.
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

// evicted is what came of a round of eviction.
type evicted struct {
	entries int
	freed   int64 // bytes; an entry with files that could not be unlinked frees none
	taken   int64 // bytes of the file that was left to a put, booked as an orphan's
	failed  error // why a file could not be unlinked
	behind  bool  // the rest has no copy in the next level yet
}

// evictSome evicts entries that the policy names, up to the bytes wanted. The caller holds the turn. reuseFor may get one
// of the files instead. Only entries of the tenant are evicted, if one is named. Where there is a next level, what has no copy
// there and so many hits as spares says stays, unless that is 0.
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
	if offered && reuseFor.temp != "" { // the file is there before the put's bytes are reserved
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

// unlinkVictim is unlink for a victim. Where not even its first file can be unlinked it stays, all of it: its bytes would not
// be free.
func (c *sole) unlinkVictim(v *entries.Eviction, pieces uint64) (left int64, stays bool, failed error) {
	if pieces != 0 && pieces == v.Pieces {
		err := c.r.Unlink(c.r.victim(v, uint32(bits.TrailingZeros64(pieces))))
		c.vanished(err)
		switch {
		case err == nil, errors.Is(err, fs.ErrNotExist):
			pieces &= pieces - 1
		case errors.Is(err, files.ErrRead): // its bytes stay in the account until that is over
		case health.Judge(err) != health.Unanswered: // else it may go yet
			return 0, true, err
		}
	}
	left, failed = c.unlink(v, pieces)
	return left, false, failed
}

// A put that evicts takes over a victim's file where it can: renamed to be the put's temporary and overwritten in place.
// That spares an unlink, a create and the allocation of blocks, which cost more than the write. A victim has no pins, so
// it is not open in this process; and a file says in its header which piece it is, so what a power failure leaves under the
// victim's name is a miss. Only a root of one's own does so: where hosts share one, another may be reading the victim.

// offerFile makes the file of one of a victim's pieces the temporary of the put, if it may have the right size, and returns
// the pieces with files that are still to be unlinked. The caller holds the turn, and not the root's lock.
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
		if !health.Judge(err).Untouched() { // else a rename can report an error although it happened
			r.Orphans.AddLate(temp, err)
			r.Discard(temp, 0) // what nothing is known of is at its old name, in the account
		}
		return v.Pieces
	}
	r.Leave(name)
	reuseFor.temp = temp
	return v.Pieces &^ bit
}
