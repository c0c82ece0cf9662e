package store

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/internal/store/shared"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// SharedStats is a root's part among the hosts that share it.
type SharedStats = shared.Stats

func newSharedRoot(r *root) *sharedRoot {
	c := &sharedRoot{
		root: r, kept: r.kept, set: &r.Set, began: r.store.cfg.Now(), pending: map[shared.ID]*pendingEviction{},
	}
	c.newMember, c.walk = c.directoryMember, func(ctx context.Context, c *scan) error { return c.walk(ctx) }
	r.guardDirectory(c, false)
	return c
}

func (r *sharedRoot) file(base string) string                 { return base + "." + r.root.store.cfg.HostID }
func (r *sharedRoot) ownsTemp(host string) bool               { return host == r.root.store.cfg.HostID }
func (r *sharedRoot) forget(string, string)                   {} // another host may have use for it
func (r *sharedRoot) entryRanks(rank uint32, _ uint64) uint64 { return 1 << rank }
func (r *sharedRoot) mayInsert(p *Put) error                  { return r.mayEnter(p.class, &p.key, p.mark.Fingerprint) }

// The evictor makes room, ahead of need too, and no entry leaves for a lower level: this host may not be the evictor.

func (r *sharedRoot) turn(context.Context, uint32) error { return nil }
func (r *sharedRoot) endTurn()                           {}
func (r *sharedRoot) grew()                              {}
func (r *sharedRoot) shrink(context.Context) bool        { return true }
func (r *sharedRoot) published(entries.Mark)             {}
func (r *sharedRoot) loaded(entries.Mark)                {}
func (r *sharedRoot) offer()                             {}
func (r *sharedRoot) drain(context.Context)              {}

func (r *sharedRoot) reserve(ctx context.Context, w reservation) error {
	var credit *shared.Credit
	if w.reuseFor != nil {
		credit = &w.reuseFor.credit
	}
	return r.reserveCredit(ctx, w.Want, credit, func() error { return w.booked(r.root) })
}

// mayAwait implements [kind]: the removal may wait for hosts that are silent.
func (r *sharedRoot) mayAwait(key kv.Key) error {
	return fmt.Errorf("%w: %s is being evicted from %s", ErrNoSpace, key, r.root.Path)
}

// aborted implements [kind]: a put that tries again takes credit again.
func (r *sharedRoot) aborted(p *Put) { r.root.Unreserve(p.mark.Slot, p.rank, p.class.FileBytes()) }

// createTemp implements [kind]: a temporary stands among this host's, where the others find it.
func (r *sharedRoot) createTemp(p *Put) (staging.File, error) {
	temp, err := r.tempName(r.root.store.seq.TempName(p.target), p.credit)
	if err != nil {
		return nil, err
	}
	p.temp = temp
	f, err := staging.OpenDirect(r.root.FS, p.temp, newTemp, 0o600)
	if err != nil {
		return nil, err
	}
	return r.guard(r.root.metered(f), p.credit), nil
}

func (r *sharedRoot) openTemp(p *Put) (staging.File, error) {
	f, err := r.root.FS.OpenFile(p.temp, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	return r.guard(f, p.credit), nil
}

// publish implements [kind]. After an error the evictor clears the temporary.
func (r *sharedRoot) publish(p *Put, info staging.Info) error {
	rec := p.record()
	rec.Bytes = pieceformat.Padded(info.Allocated)
	err := r.publishRecord(p.temp, p.target, rec, &p.credit)
	if err == nil || errors.Is(err, shared.ErrDoubt) {
		p.temp = "" // the member's
	}
	if err == nil || errors.Is(err, shared.ErrFenced) {
		return err
	}
	if now, look := r.root.FS.Stat(p.target); look == nil && now.Same(info) {
		return nil // it happened all the same
	}
	return err
}

// removeTemp implements [kind]. Where the temporary would not go the put's credit stays with it.
func (r *sharedRoot) removeTemp(p *Put) {
	left, credit := r.discard(p.temp, p.class.FileBytes()), p.credit
	if left > 0 && credit.Bytes() > 0 && r.root.Orphans.OnRemoval(p.temp, func() { r.returnCredit(credit) }) {
		p.credit = shared.Credit{}
	}
}

func (r *sharedRoot) giveBack(p *Put) {
	r.returnCredit(p.credit)
	p.credit = shared.Credit{}
}

func (r *sharedRoot) nameTaken(p *Put, h *pieceformat.Header, damage error) error {
	if damage == nil {
		cause := fmt.Errorf("the name is of key %s: %w", h.Key, pieceformat.ErrWrongPiece)
		if p.name == "" {
			return cause
		}
		return p.leaveName(cause)
	}
	bad := p.record()
	bad.Pieces, bad.Bytes = 1<<p.rank, 0
	r.reportDamaged(p.class, bad)
	return fmt.Errorf("a damaged file has the name: %w", damage)
}

func (r *sharedRoot) dropped(p *Put) {
	r.propose(&entries.Eviction{Class: p.class, Key: p.key, Names: namesOf(p.rank, p.name)}, 1<<p.rank)
}

func (r *sharedRoot) unlink(v *entries.Eviction, pieces uint64) (left int64, failed error) {
	r.propose(v, pieces)
	return 0, nil
}

func (r *sharedRoot) unlinkDamaged(v *entries.Eviction, _ uint32, name string, cause error) {
	r.root.Log.Warn("damaged piece: the evictor is asked to remove it", "file", name, "cause", cause)
	r.propose(v, v.Pieces)
}

// identify implements [kind]. It fails unless the directory is the one that was there when this host joined.
func (r *sharedRoot) identify() (empty bool, err error) {
	if err := r.root.directory.Same(); err != nil {
		return false, fmt.Errorf("%w, and shared: restart kvhost to join it", err)
	}
	return false, nil
}

func (r *sharedRoot) start() {}
func (r *sharedRoot) save()  {}

func (r *sharedRoot) recover(context.Context) error {
	if err := r.join(r.root.recovery); err != nil {
		return err
	}
	r.root.warnOfSpace(func(s staging.Space) int64 { return s.Total }) // of which other hosts have some
	return nil
}

// record describes the piece for the other hosts.
func (p *Put) record() shared.Record {
	return shared.Record{
		Op: shared.Published, Names: namesOf(p.rank, p.name), Namespace: p.class.Namespace.Digest, Group: p.class.Group,
		Rank: p.rank, Key: p.key, Parent: p.parent, Depth: p.depth, Tenant: p.tenant, Pieces: p.ranks, StoreTime: p.stamp,
	}
}
