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

// sharedRoot is the [kind] of a directory that several hosts share. One of them evicts for all, which lends the others
// credit for what they write and removes what they report. An entry gets bytes rank by rank, because other hosts may write
// the other ranks, and nothing is granted while this host may have missed a removal.
type sharedRoot struct {
	*membership
	root *root
}

func newSharedRoot(r *root) *sharedRoot {
	s := r.store
	c := &sharedRoot{root: r, membership: newMembership(membershipConfig{
		Entries: &r.Set, Kept: r.kept, Host: s.cfg.HostID, Capacity: r.cfg.Capacity, High: s.cfg.High, Low: s.cfg.Low,
		Poll: r.cfg.Poll, Lapse: r.cfg.Lapse, Now: s.cfg.Now, Scheduler: r.cfg.Scheduler,
	})}
	r.guardDirectory(c, false)
	return c
}

func (c *sharedRoot) file(base string) string                 { return base + "." + c.root.store.cfg.HostID }
func (c *sharedRoot) ownsTemp(host string) bool               { return host == c.root.store.cfg.HostID }
func (c *sharedRoot) forget(string, string)                   {} // another host may have use for it
func (c *sharedRoot) entryRanks(rank uint32, _ uint64) uint64 { return 1 << rank }
func (c *sharedRoot) decodes() bool                           { return true } // some hosts may not read the other version
func (c *sharedRoot) mayInsert(p *Put) error                  { return c.mayEnter(p.class, &p.key, p.mark.Fingerprint) }

// The evictor makes room, ahead of need too, and no entry leaves for a lower level: this host may not be the evictor.

func (c *sharedRoot) turn(context.Context, uint16, int64) (bool, error) { return false, nil }
func (c *sharedRoot) endTurn()                                          {}
func (c *sharedRoot) grew()                                             {}
func (c *sharedRoot) wake()                                             {}
func (c *sharedRoot) shrink(context.Context) bool                       { return true }
func (c *sharedRoot) published(entries.Mark)                            {}
func (c *sharedRoot) offer()                                            {}
func (c *sharedRoot) drain(context.Context)                             {}

func (c *sharedRoot) reserve(ctx context.Context, w reservation) error {
	var credit *shared.Credit
	if w.reuseFor != nil {
		credit = &w.reuseFor.credit
	}
	return c.reserveCredit(ctx, w.Want, credit, func() error { return w.booked(c.root) })
}

// mayAwait implements [kind]: the removal may wait for hosts that are silent.
func (c *sharedRoot) mayAwait(key kv.Key) error {
	return fmt.Errorf("%w: %s is being evicted from %s", ErrNoSpace, key, c.root.Path)
}

// aborted implements [kind]: a put that tries again takes credit again.
func (c *sharedRoot) aborted(p *Put) { c.root.Unreserve(p.mark.Slot, p.rank, p.class.FileBytes()) }

// createTemp implements [kind]: a temporary stands among this host's, where the others find it.
func (c *sharedRoot) createTemp(p *Put) (staging.File, error) {
	temp, err := c.tempName(c.root.store.seq.TempName(p.target), p.credit)
	if err != nil {
		return nil, err
	}
	p.temp = temp
	f, err := staging.OpenDirect(c.root.FS, p.temp, newTemp, 0o600)
	if err != nil {
		return nil, err
	}
	return c.guard(c.root.metered(f), p.credit), nil
}

func (c *sharedRoot) openTemp(p *Put) (staging.File, error) {
	f, err := c.root.FS.OpenFile(p.temp, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	return c.guard(f, p.credit), nil
}

// publish implements [kind]. After an error the evictor clears the temporary.
func (c *sharedRoot) publish(p *Put, info staging.Info) error {
	rec := p.record()
	rec.Bytes = pieceformat.Padded(info.Allocated)
	err := c.publishRecord(p.temp, p.target, rec, &p.credit)
	if err == nil || errors.Is(err, shared.ErrDoubt) {
		p.temp = "" // the member's
	}
	if err == nil || errors.Is(err, shared.ErrFenced) {
		return err
	}
	if now, look := c.root.FS.Stat(p.target); look == nil && now.Same(info) {
		return nil // it happened all the same
	}
	return err
}

// removeTemp implements [kind]. Where the temporary would not go the put's credit stays with it.
func (c *sharedRoot) removeTemp(p *Put) {
	left, credit := c.discard(p.temp, p.class.FileBytes()), p.credit
	if left > 0 && credit.Bytes() > 0 && c.root.Orphans.OnRemoval(p.temp, func() { c.returnCredit(credit) }) {
		p.credit = shared.Credit{}
	}
}

func (c *sharedRoot) giveBack(p *Put) {
	c.returnCredit(p.credit)
	p.credit = shared.Credit{}
}

func (c *sharedRoot) nameTaken(p *Put, h *pieceformat.Header, damage error) error {
	if damage == nil {
		cause := fmt.Errorf("the name is of key %s: %w", h.Key, pieceformat.ErrWrongPiece)
		if p.name == "" {
			return cause
		}
		return p.leaveName(cause)
	}
	bad := p.record()
	bad.Pieces, bad.Bytes = 1<<p.rank, 0
	c.reportDamaged(p.class, bad)
	return fmt.Errorf("a damaged file has the name: %w", damage)
}

func (c *sharedRoot) unlink(v *entries.Eviction, pieces uint64) (left int64, failed error) {
	c.propose(v, pieces)
	return 0, nil
}

func (c *sharedRoot) unlinkDamaged(v *entries.Eviction, _ uint32, name string, cause error) {
	c.root.Log.Warn("damaged piece: the evictor is asked to remove it", "file", name, "cause", cause)
	c.propose(v, v.Pieces)
}

// identify implements [kind]. It fails unless the directory is the one that was there when this host joined.
func (c *sharedRoot) identify() (empty bool, err error) {
	if err := c.root.directory.Same(); err != nil {
		return false, fmt.Errorf("%w, and shared: restart kvhost to join it", err)
	}
	return false, nil
}

func (c *sharedRoot) start() {}
func (c *sharedRoot) save()  {}

func (c *sharedRoot) recover(context.Context) error {
	if err := c.join(c.root.recovery); err != nil {
		return err
	}
	c.root.warnOfSpace(func(s staging.Space) int64 { return s.Total }) // of which other hosts have some
	return nil
}

// record describes the piece for the other hosts.
func (p *Put) record() shared.Record {
	var named []pieceformat.Name
	if p.name != "" {
		named = []pieceformat.Name{{Rank: p.rank, Path: p.name}}
	}
	return shared.Record{
		Op: shared.Published, Names: named, Namespace: p.class.Namespace.Digest, Group: p.class.Group, Rank: p.rank, Key: p.key, Parent: p.parent, Depth: p.depth, Tenant: p.tenant, Pieces: p.ranks, StoreTime: p.stamp,
	}
}
