package store

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"time"

	"github.com/kvhost/kvhost/host/internal/store/capacity"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/internal/store/shared"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

const (
	// creditPolls is the number of polls that a put waits for credit. In that time the evictor has to notice the request,
	// propose victims, and receive the answers of all hosts.
	creditPolls = 6
	leastWait   = 2 * time.Second
	// mostWaiting is the maximum number of puts that wait for credit. Further puts are shed at once, because a waiting put
	// blocks others with keys of the same stripe.
	mostWaiting = 64
)

// reserveCredit books the bytes of a put against credit, if it can take credit, and calls enter with the lock held. The evictor
// makes room for the bytes. If enter fails, it must have released them. It takes the lock.
func (r *joint) reserveCredit(ctx context.Context, w capacity.Want, credit *shared.Credit, enter func() error) error {
	r.set.Lock()
	defer r.set.Unlock()
	if credit != nil && w.Bytes > 0 {
		if err := r.takeCreditUnlocking(ctx, credit, w.Bytes); err != nil {
			return err
		}
	}
	r.set.Account.Commit(w.Tenant, w.Bytes)
	err := enter()
	if err != nil && credit != nil {
		// The bytes have left the account. The evictor subtracts the bytes in flight and must not see only one of the two
		// changes.
		r.inFlight -= credit.Bytes()
		r.member.Give(*credit)
		*credit = shared.Credit{}
	}
	return err
}

// takeCreditUnlocking takes credit, and waits for it for a limited time. The lock must be held. It is released during the wait.
func (r *joint) takeCreditUnlocking(ctx context.Context, credit *shared.Credit, bytes int64) error {
	var over <-chan time.Time
	for passed := 0; ; passed++ {
		more := r.member.More()
		if taken, ok := r.member.Take(bytes); ok {
			*credit = taken
			r.inFlight += bytes
			return nil
		}
		if over == nil {
			if r.waiting == mostWaiting {
				return r.noCredit(bytes)
			}
			r.waiting++
			defer func() { r.waiting-- }()
			over = time.After(max(creditPolls*r.root.cfg.Poll, leastWait))
		}
		r.set.Unlock()
		var err error
		if d := r.root.cfg.Scheduler; d != nil {
			if d.Wait(func() { r.step(ctx) }); passed == creditPolls {
				err = r.noCredit(bytes)
			}
		} else {
			select {
			case <-more:
			case <-over:
				err = r.noCredit(bytes)
			case <-ctx.Done():
				err = ctx.Err()
			}
		}
		r.set.Lock()
		if err != nil {
			return err
		}
	}
}

func (r *joint) noCredit(bytes int64) error {
	return fmt.Errorf("%w: %s: the evictor of the hosts that share it has given this one no credit for %d bytes",
		capacity.ErrNoSpace, r.kept.Path, bytes)
}

// returnCredit returns credit. Nothing that was written against it may be on the disk any more. It takes the lock.
func (r *joint) returnCredit(credit shared.Credit) {
	if credit.Bytes() == 0 {
		return
	}
	r.set.Lock()
	r.inFlight -= credit.Bytes()
	r.set.Unlock()
	r.member.Give(credit)
}

// publishRecord gives a temporary its name and uses up the credit. The bytes no longer count as in flight before the evictor
// can learn of the piece.
func (r *joint) publishRecord(temp, target string, rec shared.Record, credit *shared.Credit) error {
	bytes := credit.Bytes()
	r.set.Lock()
	r.inFlight -= bytes
	r.set.Unlock()
	err := r.member.Publish(temp, target, rec, credit)
	if errors.Is(err, fs.ErrNotExist) && !errors.Is(err, shared.ErrFenced) {
		if err = r.kept.MakeDir(filepath.Dir(target)); err == nil {
			err = r.member.Publish(temp, target, rec, credit)
		}
	}
	if errors.Is(err, shared.ErrDoubt) {
		return err // the member keeps the credit
	}
	if err != nil {
		r.set.Lock()
		r.inFlight += bytes
		r.set.Unlock()
		return err
	}
	*credit = shared.Credit{}
	return nil
}

// mayEnter implements [owner]. It does not wait for a removal, which may itself wait for silent hosts.
func (r *joint) mayEnter(cl *catalog.Class, key *kv.Key, fp uint64) error {
	slot := r.set.Index.Find(fp, cl.Base, key)
	if r.pending[shared.ID{Namespace: cl.Namespace.Digest, Group: cl.Group, Key: *key}] != nil ||
		slot != index.None && r.set.Index.At(slot).Is(index.Evicting) {
		return fmt.Errorf("%w: %s is being evicted from %s", capacity.ErrNoSpace, key, r.kept.Path)
	}
	if slot != index.None {
		return fmt.Errorf("%w: another host has just stored %s", entries.ErrResident, key)
	}
	return nil
}

// propose asks the evictor to remove pieces of an entry that leaves this host's index. Until they are removed, their bytes are
// in the account in addition to the entry's. It takes the lock.
func (r *joint) propose(d *entries.Eviction, pieces uint64) {
	var there uint64
	var left int64
	for rank := range entries.Ranks(pieces) {
		for _, rel := range filesOf(d.Class, &d.Key, 1<<rank, d.Names) {
			info, err := r.kept.FS.Stat(r.kept.Slash + rel)
			switch {
			case errors.Is(err, fs.ErrNotExist):
				r.set.Counted(&r.set.Count.Vanished)
				continue
			case err != nil:
				left += d.Class.FileBytes()
			default:
				left += pieceformat.Padded(info.Allocated)
			}
			there |= 1 << rank
		}
	}
	if there == 0 {
		return
	}
	rec := shared.Record{
		Namespace: d.Class.Namespace.Digest, Group: d.Class.Group, Key: d.Key, Pieces: there, Bytes: left,
	}
	for _, n := range d.Names {
		if there&(1<<n.Rank) != 0 {
			rec.Names = append(rec.Names, n)
		}
	}
	r.reportDamaged(d.Class, rec)
}

// reportDamaged asks the evictor to remove pieces, and books their bytes as those of orphans.
func (r *joint) reportDamaged(cl *catalog.Class, rec shared.Record) {
	r.set.Lock()
	id := rec.ID()
	if r.pending[id] == nil {
		r.pending[id] = &pendingEviction{}
	}
	if d := r.pending[id]; rec.Bytes > 0 {
		d.orphaned += rec.Bytes
		for _, rel := range filesOf(cl, &rec.Key, rec.Pieces, rec.Names) {
			d.learn(rel)
		}
		r.set.Account.Add(capacity.Orphans, rec.Bytes)
	}
	r.set.Unlock()
	r.member.ReportDamaged(rec)
}

// guard returns a file that fails with [shared.ErrFenced] when the credit of its put is void. The file has no name then, and no
// host counts its bytes.
func (r *joint) guard(f staging.File, credit shared.Credit) staging.File {
	return &guarded{File: f, root: r, credit: credit}
}

// guarded is a temporary that is being written.
type guarded struct {
	staging.File
	root   *joint
	credit shared.Credit
}

func (g *guarded) check() error {
	if !g.root.member.Holds(g.credit) {
		return fmt.Errorf("writing %s: %w", g.Name(), shared.ErrFenced)
	}
	return nil
}

func (g *guarded) WriteAt(p []byte, off int64) (int, error) {
	if err := g.check(); err != nil {
		return 0, err
	}
	return g.File.WriteAt(p, off)
}

func (g *guarded) Allocate(n int64) error {
	if err := g.check(); err != nil {
		return err
	}
	return g.File.Allocate(n)
}
