package store

import (
	"context"
	"time"

	"github.com/kvhost/kvhost/abi"
)

// evictAhead is the background evictor: woken above the high watermark, it evicts down to the low one, and further for
// puts that wait. It ends with ctx.
func (c *ownRoot) evictAhead(ctx context.Context) {
	r := c.r
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.woken:
		}
		if c.evicting.Acquire(ctx, 1) != nil {
			return
		}
		freed := int64(0)
		for ctx.Err() == nil && r.Health.Takes() && !r.IsScanning() {
			excess, full := r.Account.Evict(r.store.live.Load().Low), r.SlotsFull()
			if excess <= 0 && !full {
				break
			}
			got := c.evictSome(max(excess, 1), abi.None, nil, true)
			freed += got.freed
			if got.freed > 0 || full && got.entries > 0 {
				continue
			}
			// No victims, or files that cannot be unlinked: more of them would not help.
			if over := r.Account.Overcommitted(); over <= 0 || !r.Quarantine.Shrink(over) {
				break
			}
		}
		r.Account.Round(freed == 0 && (r.Account.Overcommitted() > 0 || r.SlotsFull()))
		c.endTurn()
	}
}

// flushEvery makes what was published durable, a batch at a time, and once more at the end. It ends with ctx.
func (r *root) flushEvery(ctx context.Context, every time.Duration) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			r.flush()
			return
		case <-tick.C:
			r.flush()
		}
	}
}

// flush is one such batch. When the file system cannot say that the bytes are on disk, nobody may count on them: the
// batch's entries are dropped. The kernel says so once, so those go too that were published meanwhile, and pieces that
// were being written are not published: the next sync would not tell of them.
func (r *root) flush() {
	if !r.Health.Serves() {
		return // before it comes back, what is not durable goes
	}
	r.Lock()
	batch := r.unsynced
	r.unsynced = nil
	r.Unlock()
	if len(batch) == 0 {
		return
	}
	err := r.FS.SyncFS(r.Path)
	if err == nil {
		return
	}
	err = r.SyncFailed(err)
	r.unsure.Add(1)
	r.Lock()
	batch = append(batch, r.unsynced...)
	r.unsynced = nil
	r.Unlock()
	r.Log.Error("a batch could not be made durable; its entries are dropped", "entries", len(batch), "error", err)
	for _, m := range batch {
		r.drop(m, 0)
	}
}
