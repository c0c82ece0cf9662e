package store

import (
	"errors"
	"fmt"
	"io/fs"

	"github.com/kvhost/kvhost/host/internal/store/capacity"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/files"
	"golang.org/x/sys/unix"
)

// evicted is what came of a round of eviction.
type evicted struct {
	entries int
	freed   int64 // bytes; an entry whose files could not be unlinked frees none
	taken   int64 // bytes of the file that was left to a put, booked as an orphan's
	failed  error // why a file could not be unlinked
	behind  bool  // the rest has no copy in the next level yet
}

// evictSome evicts entries that the policy names, up to the bytes wanted. The caller holds the turn. reuseFor may get one
// of the files instead. Only entries of the tenant are evicted, if one is named. Where there is a next level, lossy says
// that entries may go without a copy there.
func (c *ownRoot) evictSome(bytes int64, tenant uint32, reuseFor *Put, lossy bool) (got evicted) {
	r := c.r
	r.Lock()
	list, behind := c.leaving.Evict(c.victims[:0], bytes, tenant, lossy)
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
		n, err := c.unlink(v, c.offerFile(v, reuseFor))
		if left += n; err != nil && got.failed == nil {
			got.failed = err
		}
	}
	r.Lock()
	defer r.Unlock()
	for i := range list {
		got.entries++
		got.freed += r.Index.Bytes(list[i].Slot)
		r.FinishEvict(&list[i])
	}
	r.Count.Evictions += uint64(got.entries)
	if offered && reuseFor.temp != "" { // the file is there before the put's bytes are reserved
		got.taken = reuseFor.class.FileBytes()
		r.Account.Add(capacity.Orphans, got.taken)
	}
	got.freed = max(0, got.freed-left)
	return got
}

// drop removes an entry at once that is not, or no longer, what the index says. keep names ranks whose files the caller
// removes. The caller does not hold the lock.
func (r *root) drop(m entries.Mark, keep uint64) {
	r.Evict(m, func(v *entries.Eviction) { _, _ = r.kind.unlink(v, v.Pieces&^keep) }) // it logs what fails, and retries
}

// dropDamaged removes an entry because of one rank's file, which goes into quarantine.
func (r *root) dropDamaged(m entries.Mark, rank uint32, name string, cause error) {
	r.Evict(m, func(v *entries.Eviction) {
		r.Counted(&r.Count.Damaged)
		r.kind.unlinkDamaged(v, rank, name, cause)
	})
}

// unopened judges an error of opening the file of a rank. One that is this host's own, and passes, changes nothing; after
// any other the entry would be promised, and fail, again and again: it is dropped, so that the next lookup misses.
func (r *root) unopened(m entries.Mark, rank uint32, name string, err error) error {
	absent := errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESTALE)
	switch {
	case absent && !r.directory.Present():
		return fmt.Errorf("%w: %w", ErrRootOut, err) // all of it is
	case absent || files.Misled(err):
		r.Counted(&r.Count.Vanished)
		r.Quarantine.Recount()
		r.drop(m, 0)
	case r.notOfFile(m, err), errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE), errors.Is(err, unix.ENOMEM):
		return err
	default:
		r.dropDamaged(m, rank, name, err)
	}
	return fmt.Errorf("%w: %w", ErrGone, err)
}
