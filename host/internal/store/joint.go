package store

import (
	"context"
	"errors"
	"fmt"

	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/internal/store/shared"
	"github.com/kvhost/kvhost/staging"
)

// newJoint returns the joint owner of a root. The evictor of the hosts makes room, including the room that is made ahead of
// need. No entry leaves for a lower level, because this host may not be the evictor.
func newJoint(r *root) *joint {
	c := &joint{
		root: r, kept: r.kept, set: &r.Set, began: r.store.cfg.Now(), pending: map[shared.ID]*pendingEviction{},
	}
	c.newMember, c.walk = c.directoryMember, func(ctx context.Context, c *scan) error { return c.walk(ctx) }
	if r.cfg.Remote {
		c.audits = &audits{root: c}
		c.newMember, c.walk, c.confirms = c.bucketMember, c.audits.walk, true
	}
	return c
}

func (r *joint) reserve(ctx context.Context, w reservation) error {
	var credit *shared.Credit
	if w.reuseFor != nil {
		credit = &w.reuseFor.credit
	}
	return r.reserveCredit(ctx, w.Want, credit, func() error { return w.booked(r.root) })
}

// createTemp implements [owner]. The temporary is among those of this host, so that the others find it.
func (r *joint) createTemp(p *Put) (staging.File, error) {
	temp, err := r.member.Temp(r.root.store.seq.TempName(p.target), p.credit)
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

// publish implements [owner]. After an error, the evictor removes the temporary.
func (r *joint) publish(p *Put, info staging.Info) error {
	rec := p.record()
	rec.Bytes = pieceformat.Padded(info.Allocated)
	err := r.publishRecord(p.temp, p.target, rec, &p.credit)
	if err == nil || errors.Is(err, shared.ErrDoubt) {
		p.temp = "" // the member has taken it over
	}
	if err == nil || errors.Is(err, shared.ErrFenced) {
		return err
	}
	if now, look := r.root.FS.Stat(p.target); look == nil && now.Same(info) {
		return nil // the publication succeeded in spite of the error
	}
	return err
}

// settle implements [owner]. If the temporary could not be removed, the credit of the put stays with it.
func (r *joint) settle(p *Put, temp string, left int64) {
	credit := p.credit
	p.credit = shared.Credit{}
	if left == 0 || credit.Bytes() == 0 || !r.root.Orphans.OnRemoval(temp, func() { r.returnCredit(credit) }) {
		r.returnCredit(credit)
	}
}

func (r *joint) nameTaken(p *Put, h *pieceformat.Header, damage error) error {
	if damage == nil {
		cause := fmt.Errorf("the name is of key %s: %w", h.Key, pieceformat.ErrWrongPiece)
		if p.name == "" {
			return cause
		}
		return p.leaveName(cause)
	}
	bad := p.record()
	bad.Pieces, bad.Bytes = 1<<p.q.Rank, 0
	r.reportDamaged(p.class, bad)
	return fmt.Errorf("a damaged file has the name: %w", damage)
}

// withdraw implements [owner]. The file stays, because other hosts may use it. It is booked as a file that is not served.
func (r *joint) withdraw(p *Put) { r.overlook(p.class.FileBytes()) }

func (r *joint) unlink(v *entries.Eviction, pieces uint64) (left int64, failed error) {
	r.propose(v, pieces)
	return 0, nil
}

// recover implements [owner]. A host that wants a bucket for itself takes the lock and then looks for members. This host has
// become a member and then looks for the lock. If both start at the same time, one of them sees the other.
func (r *joint) recover(context.Context) error {
	if err := r.join(r.root.recovery); err != nil {
		return err
	}
	r.root.warnOfSpace(func(s staging.Space) int64 { return s.Total }) // other hosts use a part of it
	if r.audits == nil {
		return nil
	}
	if free, err := r.unlocked(); free || err != nil {
		return err
	}
	r.leave()
	return fmt.Errorf("%w: %s: a host has it for itself: stop it, or set shared = true there too", ErrRootBusy, r.kept.Path)
}

// record returns the record of the piece for the other hosts.
func (p *Put) record() shared.Record {
	return shared.Record{
		Op: shared.Published, Names: namesOf(p.q.Rank, p.name), Namespace: p.class.Namespace.Digest, Group: p.class.Group,
		Rank: p.q.Rank, Key: p.q.Key, Parent: p.q.Parent, Depth: p.q.Depth, Tenant: p.q.Tenant, Pieces: p.q.Ranks, StoreTime: p.stamp,
	}
}
