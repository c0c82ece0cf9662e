package store

import (
	"context"
	"fmt"

	"github.com/kvhost/kvhost/abi"
)

// want is what a reservation asks for.
type want struct {
	bytes  int64
	slot   bool  // a slot, too
	quota  quota // of whose the bytes will be
	demand bool  // it may evict: its caller holds turn
	heir   *Put  // it may get a victim's file; nil: nobody
}

// makeRoom sees to it that what is wanted is free. The caller holds mu, and has it when it returns, also with an error;
// meanwhile mu is let go, while files are unlinked, or while the background evictor is waited for.
func (r *root) makeRoom(ctx context.Context, w want) error {
	if r.fellows != nil {
		if w.heir == nil || w.bytes == 0 {
			return nil // the evictor sees to it
		}
		return r.fellows.take(ctx, w.heir, w.bytes)
	}
	if w.bytes > r.cfg.Capacity {
		return fmt.Errorf("%w: %d bytes in a root of %d", ErrNoSpace, w.bytes, r.cfg.Capacity)
	}
	// What cannot fit, whatever goes, is to cost nobody anything.
	if most := r.limit(); w.bytes > 0 && w.bytes > most && !r.scanning {
		return fmt.Errorf("%w: an entry of %d bytes in %s, which may take %d at present", ErrNoSpace, w.bytes, r.dir, most)
	}
	if q := w.quota.bytes; q >= 0 && w.bytes > q {
		return fmt.Errorf("%w: an entry of %d bytes is over the quota of tenant %d in %s, %d bytes", ErrNoSpace, w.bytes, w.quota.tenant, r.dir, q)
	}
	wait := waiting{root: r, want: w}
	defer wait.end()
	for {
		short, tenant := r.used+w.bytes-r.limit(), abi.None
		if !w.demand && wait.stops == nil {
			short += r.wanted // who waits was here before
		}
		over := w.quota.over(r, w.bytes)
		noSlot := w.slot && r.x.Len() == r.x.Max()
		if short <= 0 && over <= 0 && !noSlot {
			return nil
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		if r.scanning {
			return fmt.Errorf("%w: %d bytes are short in %s beside what its scan may yet find", ErrNoSpace, short, r.dir)
		}
		if !w.demand {
			if over > 0 {
				return w.quota.error(r, over)
			}
			if err := wait.round(ctx); err != nil {
				return fmt.Errorf("%w: %d bytes are short in %s: %w", ErrNoSpace, short, r.dir, err)
			}
			continue
		}
		if over > 0 {
			short, tenant = over, w.quota.tenant
		}
		got := r.evictSome(max(short, 1), tenant, w.heir)
		if got.freed > 0 || noSlot && got.entries > 0 {
			continue
		}
		switch {
		case got.failed != nil:
			// Their bytes are still taken, and the next ones' would be.
			return fmt.Errorf("%w: %d bytes are short in %s and victims' files would not go: %w", ErrNoSpace, short, r.dir, got.failed)
		case over > 0:
			return w.quota.error(r, over)
		case r.quar.bytes > 0 && short > 0:
			r.purge(short)
		case noSlot:
			return fmt.Errorf("%w: all %d slots of %s are taken and the evict policy names no victim", ErrNoSpace, r.x.Max(), r.dir)
		default:
			return fmt.Errorf("%w: %d bytes are short in %s and the evict policy names no victim", ErrNoSpace, short, r.dir)
		}
	}
}

// waiting is a put's wait for the background evictor.
type waiting struct {
	root  *root
	want  want
	last  uint64 // the round in vain after which it has waited enough
	ctx   context.Context
	stops []func()
}

// round waits for something to be freed. It gives up when the evictor has freed nothing in a whole round since the wait
// began, and after the time that is a put's patience. mu is held, and let go meanwhile.
func (w *waiting) round(ctx context.Context) error {
	r := w.root
	if w.stops == nil {
		r.count.waits++
		r.wanted += w.want.bytes
		w.last = r.vain + 2 // the one under way may have begun before
		var cancel context.CancelFunc
		w.ctx, cancel = context.WithTimeout(ctx, r.store.cfg.EvictPatience)
		awake := context.AfterFunc(w.ctx, func() {
			r.mu.Lock() // not between the look at the context and the wait
			defer r.mu.Unlock()
			r.settled.Broadcast()
		})
		w.stops = []func(){cancel, func() { awake() }}
	}
	switch {
	case r.vain >= w.last:
		return errEvictor
	case w.ctx.Err() != nil:
		return w.ctx.Err()
	case !r.health.Takes() || r.store.closed.Load():
		return ErrRootOut
	}
	wake(r.evictorWake)
	r.settled.Wait()
	return nil
}

func (w *waiting) end() {
	if w.stops == nil {
		return
	}
	w.root.wanted -= w.want.bytes
	for i := range w.stops {
		w.stops[len(w.stops)-1-i]()
	}
}
