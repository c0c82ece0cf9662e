package store

import (
	"context"
	"errors"
	"fmt"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/internal/store/moves"
	"github.com/kvhost/kvhost/host/kv"
)

// This file holds the methods of a put that reserve its room: an entry of its own, or a part of an existing one.

// reserve creates the entry of the put or adds its piece to the existing one.
func (s *Store) reserve(ctx context.Context, p *Put) (*Put, error) {
	found, err := s.join(ctx, p)
	if err == nil && !found {
		if err = s.admitted(p); err == nil {
			err = s.insert(ctx, p)
		}
	}
	if err != nil {
		return nil, s.unstored(p, err)
	}
	if !found {
		p.state = reserved
		return p, nil
	}
	p.ask()
	p.place()
	if err = p.extend(ctx); err != nil {
		p.Abort(err)
		return nil, err
	}
	p.state = reserved
	return p, nil
}

// unstored ends a put that got no room and returns its error. A piece that a farther level has counts as resident.
func (s *Store) unstored(p *Put, err error) error {
	if p.farther != nil {
		p.unwatch()
		err = ErrResident
	}
	if errors.Is(err, ErrResident) && p.q.copy == nil {
		s.count.resident.Add(1)
	}
	return err
}

// levels returns the levels in which the put may be stored.
func (p *Put) levels(s *Store) []*level {
	switch {
	case p.q.copy != nil:
		return p.q.copy.level.ways(p.q.copy.entry)
	case p.farther != nil:
		return s.levels[:1]
	default:
		return s.own()
	}
}

// join adds the piece to the entry of its key, if there is one.
func (s *Store) join(ctx context.Context, p *Put) (bool, error) {
	if p.q.copy == nil && len(s.own()) > 1 && s.isStored(p) {
		return false, ErrResident
	}
	for _, l := range p.levels(s) {
		for _, r := range l.roots {
			if !r.Health.Serves() {
				continue // its entries cannot be read, so the piece may be stored elsewhere
			}
			if ok, err := r.join(ctx, p); ok || err != nil {
				return ok, err
			}
		}
	}
	return false, nil
}

// isStored reports whether the piece of a client's put exists. A piece that only farther levels have is stored in the nearest
// level as well. The client computed it although it could have been found, and a piece from a client can be near at once,
// unlike one from a disk or a bucket. This is not done if a nearer level has a part of the entry on a disk: the part may be of
// an older version, and pieces of two versions must not be mixed.
func (s *Store) isStored(p *Put) bool {
	mixes := false
	for _, r := range s.ours() {
		if !r.Health.Serves() {
			continue
		}
		entry, piece := r.watch(p, mixes)
		if piece {
			return p.farther == nil
		}
		mixes = mixes || entry && !r.cfg.Volatile
	}
	return false
}

// watch reports whether the root has the entry and the piece of a put. If the nearest level may get the piece as well, the
// copies of the entry are counted until the put ends, and a waiting copy to that level is cancelled.
func (r *root) watch(p *Put, mixes bool) (entry, piece bool) {
	r.Lock()
	defer r.Unlock()
	slot := r.Index.Find(p.mark.Fingerprint, p.class.Base, &p.q.Key)
	if slot == index.None || r.Index.At(slot).Is(index.Evicting) {
		return false, false
	}
	if r.Index.Pieces(slot)&(1<<p.q.Rank) == 0 {
		return true, false
	}
	if r.level != r.store.levels[0] && r.Index.At(slot).Is(index.Complete) && !mixes {
		r.Moves.Forgo(slot)
		r.store.copies.Watch(p.mark.Fingerprint, &r.Set)
		p.farther = r
	}
	return true, true
}

func (r *root) join(ctx context.Context, p *Put) (bool, error) {
	r.Lock()
	defer r.Unlock()
	slot, err := r.Join(ctx, p.mark.Fingerprint, p.class, &p.q.Key, p.q.Rank, p.q.copy != nil, func() error {
		return r.owner.mayEnter(p.class, &p.q.Key, p.mark.Fingerprint)
	})
	if err != nil || slot == index.None {
		return false, err
	}
	p.mark.Slot, p.class = slot, r.ClassOf(slot)
	p.begin(r)
	return true, nil
}

// begin sets the root and the store time of the put.
func (p *Put) begin(r *root) {
	p.root, p.stamp = r, r.store.seq.Stamp()
	p.compresses = compresses(r, p)
	if p.q.copy != nil {
		p.stamp = p.q.copy.header.StoreTime // a copy is as old as its source
	}
}

// admitted asks the admit policy about a new entry.
func (s *Store) admitted(p *Put) error {
	if p.farther != nil {
		c := s.levels[0].candidate(p)
		c.Kind, c.From = abi.KindPromotion, uint8(p.farther.level.number)
		if admitted, asked := s.levels[0].Admits(&c, p.class.Namespace); asked && !admitted {
			return ErrRefused
		}
		return nil
	}
	if p.q.copy != nil || p.class.Namespace.Admit.Now().Policy.TakesAllNew() {
		return nil
	}
	w := s.candidates.Get().(*candidate)
	defer s.candidates.Put(w)
	w.ask[0], w.answer[0] = s.levels[0].candidate(p), true
	if err := p.class.Namespace.Admits(w.ask[:], w.answer[:]); err != nil {
		s.admissionFault(err)
		return nil
	}
	if !w.answer[0] {
		s.count.refused.Add(1)
		return ErrRefused
	}
	return nil
}

// candidate returns the facts about a new entry for the admit policy of a level.
func (l *level) candidate(p *Put) abi.Candidate {
	parent := kv.Fingerprint(p.class.Namespace.Digest, p.class.Group, p.q.Parent)
	c := abi.Candidate{
		Key: p.mark.Fingerprint, ParentKey: parent, Namespace: p.class.Namespace.ID, Group: p.class.Group,
		Size: uint32(p.entryBytes() / abi.SizeUnit), Depth: p.q.Depth, Request: p.q.Request, Tenant: p.q.Tenant,
		Time: l.store.seq.Clock(), Kind: abi.KindNew, From: abi.NoLevel, To: uint8(l.number),
	}
	if parent != 0 && holds(l.store.roots, parent, index.Live) {
		c.Flags = abi.CandidateParentResident
	}
	if p.q.Continued {
		c.Flags |= abi.CandidateContinued
	}
	l.store.elsewhere(&c)
	return c
}

// insert creates the entry in the nearest level that takes it.
func (s *Store) insert(ctx context.Context, p *Put) error {
	refreshFacts(s)
	p.ask()
	var err error
	levels := p.levels(s)
	var nearer *level // level that would take the entry if its memory were allocated
	for _, l := range levels {
		if nearer != nil && p.q.copy == nil { // this level would judge the entry later, when it is demoted
			c := l.candidate(p)
			if admitted, asked := l.Admits(&c, p.class.Namespace); asked && !admitted {
				break // wait for the memory
			}
		}
		if err = l.insert(ctx, p, true); err == nil || !refusedHere(err) {
			break
		}
		if nearer == nil && errors.Is(err, errAllocating) {
			nearer = l
		}
	}
	switch {
	case nearer == nil || p.farther != nil:
	case err == nil:
		nearer.early.add(early{&p.root.origin, p.mark})
	case p.q.copy != nil && p.q.copy.entry.Here: // the memory would wait for loads, and a load for the memory
		err = moves.ErrBehind
	case refusedHere(err):
		err = nearer.insert(ctx, p, false)
	}
	return err
}

// refusedHere reports whether another root may take an entry after this error: the root is out of service, has no room, or has
// used up its write budget.
func refusedHere(err error) bool {
	return errors.Is(err, ErrNoSpace) || errors.Is(err, ErrRootOut) || errors.Is(err, ErrRefused) || errors.Is(err, errAllocating)
}

// insert creates the entry in the level, preferably in the root that the place policy chose. If the memory of the root is not
// allocated yet, it waits, or returns errAllocating if now is set.
func (l *level) insert(ctx context.Context, p *Put, now bool) error {
	tenant := l.store.catalog.Tenants.Number(p.q.Tenant)
	r, err := l.enter(ctx, p)
	if err != nil {
		return err
	}
	defer r.endTurn()
	parent := kv.Fingerprint(p.class.Namespace.Digest, p.class.Group, p.q.Parent)
	if now && r.isAllocating(p.entryBytes()) {
		return errAllocating
	}
	if err := r.chargeBudget(p, p.entryBytes(), parent); err != nil {
		return err
	}
	p.begin(r)
	p.place()
	enter := func() error { return p.addEntry(tenant, parent) }
	w := reservation{Want: r.want(tenant, p.entryBytes()), slot: true, reuseFor: p, enter: enter}
	if c := p.q.copy; c != nil && !c.entry.Leaves() { // the source still exists, and entries that would be evicted for the copy may have no other copy
		hits, _ := c.entry.Worth()
		w.spares = max(1, hits)
	}
	if err := r.owner.reserve(ctx, w); err != nil {
		return p.shed(err)
	}
	return nil
}

// enter chooses the root for a new entry and takes its turn. If the root is taken out of service during the wait, enter chooses
// again.
func (l *level) enter(ctx context.Context, p *Put) (*root, error) {
	for {
		r, err := l.choose(p.answer.root)
		if err != nil {
			return nil, err
		}
		if err := r.turn(ctx, p.q.Tenant); err != nil {
			return nil, err
		}
		if r.Health.Takes() {
			freeSpace{r}.refresh() // in the put's turn, so that no victims are leaving
			return r, nil
		}
		r.endTurn()
	}
}

// addEntry creates the entry. Its bytes must be reserved and the lock must be held.
func (p *Put) addEntry(tenant uint16, parent uint64) error {
	r := p.root
	if err := r.owner.mayEnter(p.class, &p.q.Key, p.mark.Fingerprint); err != nil {
		return err
	}
	if len(r.store.levels) > 1 && r.Index.Find(p.mark.Fingerprint, p.class.Base, &p.q.Key) != index.None {
		return ErrResident // a copy and a put of the same key run at the same time
	}
	slot, err := r.Insert(&entries.New{
		Fingerprint: p.mark.Fingerprint, Class: p.class, Key: &p.q.Key, Parent: parent, Depth: p.q.Depth, Tenant: tenant,
		Rank: p.q.Rank, Reserved: p.entryRanks(), Stored: p.stamp, Request: p.q.Request, Copied: p.q.copy != nil,
	})
	if err != nil {
		return err
	}
	p.mark.Slot = slot
	r.leaving.Wake()
	return nil
}

// extend reserves the bytes of a piece that was added to an entry without bytes for it. The entry is pinned, so it cannot
// become a victim.
func (p *Put) extend(ctx context.Context) error {
	r, slot, need := p.root, p.mark.Slot, p.class.FileBytes()
	r.Lock()
	has, tenant := r.Index.Reserved(slot)&(1<<p.q.Rank) != 0, r.Index.Owner(slot).Tenant
	r.Unlock()
	if has {
		return nil // no other put adds this rank, because the stripe of the key is held
	}
	if err := r.chargeBudget(p, need, p.mark.Fingerprint); err != nil { // it continues a resident entry
		return err
	}
	if err := r.turn(ctx, p.q.Tenant); err != nil {
		return err
	}
	defer r.endTurn()
	enter := func() error {
		if r.Index.At(slot).Is(index.Evicting) { // in the meantime, while the put waited for room
			return fmt.Errorf("%w: %s has been dropped from %s", ErrNoSpace, p.q.Key, r.Path)
		}
		r.Extend(slot, p.q.Rank, need)
		r.leaving.Wake()
		return nil
	}
	w := reservation{Want: r.want(tenant, need), reuseFor: p, enter: enter}
	if err := r.owner.reserve(ctx, w); err != nil {
		return p.shed(err)
	}
	return nil
}

// shed abandons a reservation, together with a file that it may have got from a victim.
func (p *Put) shed(cause error) error {
	r := p.root
	if !errors.Is(cause, moves.ErrBehind) {
		r.Counted(&r.Count.Sheds)
	}
	p.release()
	r.budget.Refund(&p.charge)
	return cause
}

// Put reserves space for a piece. The first piece of an entry reserves the space of the whole entry. A later piece reserves its
// own space if the entry was reserved for other ranks, as by an engine with other local ranks. If there is nothing to write,
// the error is [ErrResident], [ErrRefused] or [ErrNoSpace].
func (s *Store) Put(ctx context.Context, q PutRequest) (*Put, error) {
	p, err := s.newPut(&q)
	if err != nil {
		return nil, err
	}
	class := p.class // p.class may change to the class of an existing entry
	defer class.Release()
	if q.copy == nil { // for a copy, the index refuses duplicates
		p.offer(s)
		stripe := s.stripes[p.mark.Fingerprint%uint64(len(s.stripes))]
		if err := stripe.Acquire(ctx, 1); err != nil {
			return nil, err
		}
		defer stripe.Release(1)
		s.renew(p)
	}
	for _, r := range s.roots {
		if r.recovery.seeks() && (q.copy == nil || r.level == q.copy.level) { // an earlier store may have the name that the policy gives now
			p.ask()
			r.recovery.seek(p.class, &p.q.Key, p.q.Rank, p.class.Builtin(&p.q.Key, p.q.Rank), p.name)
		}
	}
	return s.reserve(ctx, p)
}

// renew removes an expired entry, so that its key can be stored again.
func (s *Store) renew(p *Put) {
	if p.class.Namespace.TTL == 0 {
		return
	}
	for _, r := range s.roots {
		if !r.Health.Serves() {
			continue
		}
		if m, expired := r.Renew(p.mark.Fingerprint, p.class, &p.q.Key); expired {
			r.drop(m)
		}
	}
}
