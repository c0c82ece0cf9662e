package store

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"sync"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/store/capacity"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/internal/store/moves"
	"github.com/kvhost/kvhost/host/internal/store/shared"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// PutRequest names a piece that is to be stored.
type PutRequest struct {
	Namespace *catalog.Namespace
	Group     uint32
	Parent    kv.Key // kv.Root for a prefix's first chunk
	Key       kv.Key
	Depth     uint32
	Rank      uint32
	Ranks     uint64 // pieces that make the entry complete, one bit per rank; 0: all ranks of the namespace
	Request   uint32
	Tenant    uint32
	Continued bool    // the caller puts a child of the entry, too
	copy      *copyOf // it is a copy of an entry of another level
}

// Put is a reservation: space for a piece that is being written. It ends with Publish or Abort.
type Put struct {
	root       *root
	class      *catalog.Class
	mark       entries.Mark
	key        kv.Key
	parent     kv.Key
	depth      uint32
	rank       uint32
	ranks      uint64
	tenant     uint32
	stamp      int64
	copy       *copyOf // of an entry of another level
	name       string  // that its file gets, below the root; empty: the built-in one
	asked      bool    // the place policy, for the name
	chosen     uint32  // the root that the policy chose, or none
	refused    error   // why the policy's name is not used
	compresses bool    // it writes version 2
	target     string
	size       int64 // of the file by its head; 0: it has none yet

	mu   sync.Mutex
	temp string // there before file when the put was left a victim's
	file staging.File
	over bool

	credit shared.Credit   // of a shared root
	charge capacity.Charge // against the root's daily budget
	opened bool            // there was a file
}

// Put reserves space for a piece: the whole entry's at its first one, and its own where the entry was reserved for
// other ranks, as by another engine with another local run of them. The error is [ErrResident], [ErrRefused] or
// [ErrNoSpace] when nothing is to be written.
func (s *Store) Put(ctx context.Context, q PutRequest) (*Put, error) {
	p, err := s.newPut(&q)
	if err != nil {
		return nil, err
	}
	class := p.class // p's is its entry's in the end
	defer class.Release()
	if q.copy == nil { // what a copy would store twice the index refuses
		p.offer(s, &q)
		stripe := s.stripes[p.mark.Fingerprint%uint64(len(s.stripes))]
		if err := stripe.Acquire(ctx, 1); err != nil {
			return nil, err
		}
		defer stripe.Release(1)
		s.renew(p)
	}
	for _, r := range s.roots {
		if r.recovery.seeks() { // what was stored before may have the name that the policy gives now
			p.ask()
			r.recovery.seek(p.class, &p.key, p.rank, p.class.Builtin(&p.key, p.rank), p.name)
		}
	}
	return s.reserve(ctx, p, &q)
}

// reserve makes the put's entry, or adds its piece to the one that is there.
func (s *Store) reserve(ctx context.Context, p *Put, q *PutRequest) (*Put, error) {
	found, err := s.join(ctx, p, q)
	if errors.Is(err, ErrResident) && q.copy == nil {
		s.count.resident.Add(1)
	}
	if err != nil {
		return nil, err
	}
	if !found {
		if err := s.admitted(p, q); err != nil {
			return nil, err
		}
		if err := s.insert(ctx, p, q); err != nil {
			return nil, err
		}
		return p, nil
	}
	p.ask()
	p.place()
	if err = p.extend(ctx); err != nil {
		p.Abort(err)
		return nil, err
	}
	return p, nil
}

func (s *Store) newPut(q *PutRequest) (*Put, error) {
	if s.closed.Load() && q.copy == nil { // the last copies are made while the store ends
		return nil, ErrClosed
	}
	c, err := q.Namespace.OpenClass(q.Group)
	if err != nil {
		return nil, err
	}
	if q.Ranks == 0 {
		q.Ranks = c.Ranks
	}
	if q.Rank >= kv.MaxRanks || q.Ranks&(1<<q.Rank) == 0 || q.Ranks&^c.Ranks != 0 {
		return nil, fmt.Errorf("%w: rank %d of ranks %#x, the namespace has %#x", ErrUnknownNamespace, q.Rank,
			q.Ranks, c.Ranks)
	}
	for _, k := range [...]*kv.Key{&q.Key, &q.Parent} {
		for _, b := range k[c.Namespace.KeyLen:] {
			if b != 0 {
				return nil, fmt.Errorf("%w: %s is longer than the namespace's %d bytes", kv.ErrKey, k, c.Namespace.KeyLen)
			}
		}
	}
	if q.Key == kv.Root || q.Key == q.Parent {
		return nil, fmt.Errorf("%w: %s with parent %s", kv.ErrKey, q.Key, q.Parent)
	}
	if c, err = q.Namespace.AcquireClass(q.Group); err != nil {
		return nil, err
	}
	if q.copy != nil && c.Plan.Digest() != q.copy.header.Plan {
		c.Release()
		return nil, moves.ErrLayout
	}
	return &Put{
		class: c, mark: entries.Mark{Fingerprint: kv.Fingerprint(c.Namespace.Digest, c.Group, q.Key)},
		key: q.Key, parent: q.Parent, depth: q.Depth, rank: q.Rank, ranks: q.Ranks, tenant: q.Tenant,
		copy: q.copy,
	}, nil
}

// levels are those that the put may go to.
func (q *PutRequest) levels(s *Store) []*level {
	if q.copy == nil {
		return s.own
	}
	return q.copy.level.ways(q.copy.entry)
}

// join adds the piece to the entry of its key, if there is one.
func (s *Store) join(ctx context.Context, p *Put, q *PutRequest) (bool, error) {
	levels := q.levels(s)
	if q.copy == nil && len(levels) > 1 && s.has(p) { // an entry that is copied nearer lacks its later pieces there
		return false, ErrResident
	}
	for _, l := range levels {
		for _, r := range l.roots {
			if !r.Health.Serves() {
				continue // what it has is not to be had: it can be stored elsewhere
			}
			if ok, err := r.join(ctx, p); ok || err != nil {
				return ok, err
			}
		}
	}
	return false, nil
}

// has says whether any root has the piece.
func (s *Store) has(p *Put) bool {
	return slices.ContainsFunc(s.ours, func(r *root) bool {
		if !r.Health.Serves() {
			return false
		}
		r.Lock()
		defer r.Unlock()
		slot := r.Index.Find(p.mark.Fingerprint, p.class.Base, &p.key)
		return slot != index.None && !r.Index.At(slot).Is(index.Evicting) && r.Index.Pieces(slot)&(1<<p.rank) != 0
	})
}

func (r *root) join(ctx context.Context, p *Put) (bool, error) {
	r.Lock()
	defer r.Unlock()
	slot, err := r.Join(ctx, p.mark.Fingerprint, p.class, &p.key, p.rank, p.copy != nil, func() error { return r.owner.mayEnter(p.class, &p.key, p.mark.Fingerprint) })
	if err != nil || slot == index.None {
		return false, err
	}
	p.mark.Slot, p.class = slot, r.ClassOf(slot)
	p.begin(r)
	return true, nil
}

// begin notes when the put began in its root.
func (p *Put) begin(r *root) {
	p.root, p.stamp = r, r.store.seq.Stamp()
	p.compresses = compresses(r, p)
	if p.copy != nil {
		p.stamp = p.copy.header.StoreTime // it is not younger than what it is a copy of
	}
}

// candidate is what the admit policy of a level gets to know about a new entry.
func (l *level) candidate(p *Put, q *PutRequest) abi.Candidate {
	parent := kv.Fingerprint(p.class.Namespace.Digest, p.class.Group, p.parent)
	c := abi.Candidate{
		Key: p.mark.Fingerprint, ParentKey: parent, Namespace: p.class.Namespace.ID, Group: p.class.Group,
		Size: uint32(p.entryBytes() / abi.SizeUnit), Depth: q.Depth, Request: q.Request, Tenant: q.Tenant,
		Time: l.store.seq.Clock(), Kind: abi.KindNew, From: abi.NoLevel, To: uint8(l.number),
	}
	if parent != 0 && holds(l.store.roots, parent, index.Live) {
		c.Flags = abi.CandidateParentResident
	}
	if q.Continued {
		c.Flags |= abi.CandidateContinued
	}
	l.store.elsewhere(&c)
	return c
}

// admitted asks the admit policy about a new entry.
func (s *Store) admitted(p *Put, q *PutRequest) error {
	if q.copy != nil || p.class.Namespace.Admit.Now().Policy.TakesAllNew() {
		return nil
	}
	w := s.candidates.Get().(*candidate)
	defer s.candidates.Put(w)
	w.ask[0], w.answer[0] = s.levels[0].candidate(p, q), true
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

type candidate struct {
	ask    [1]abi.Candidate
	answer [1]bool
}

// holds says whether a root in service has an entry in a state.
func holds(roots []*root, fp uint64, state uint8) bool {
	for _, r := range roots {
		if !r.Health.Serves() {
			continue
		}
		r.Lock()
		there := r.Has(fp, state)
		r.Unlock()
		if there {
			return true
		}
	}
	return false
}

// entryRanks are the ranks that a new entry gets bytes for: all of them where this host writes them, and while the put has no root.
func (p *Put) entryRanks() uint64 {
	if p.root != nil && p.root.cfg.Shared { // other hosts may write the rest
		return 1 << p.rank
	}
	return p.ranks
}

func (p *Put) entryBytes() int64 {
	return int64(bits.OnesCount64(p.entryRanks())) * p.class.FileBytes()
}

// extend reserves a piece that joined an entry which has no bytes for it. The entry has a pin, so it is no victim.
func (p *Put) extend(ctx context.Context) error {
	r, slot, need := p.root, p.mark.Slot, p.class.FileBytes()
	r.Lock()
	has, tenant := r.Index.Reserved(slot)&(1<<p.rank) != 0, r.Index.Owner(slot).Tenant
	r.Unlock()
	if has {
		return nil // no other put adds this rank: the key's stripe is held
	}
	if err := r.budget.charge(p, need, p.mark.Fingerprint); err != nil { // as a continuation of what is there
		return err
	}
	if err := r.turn(ctx, p.tenant); err != nil {
		return err
	}
	defer r.endTurn()
	enter := func() error {
		if r.Index.At(slot).Is(index.Evicting) { // while the put waited for room
			return fmt.Errorf("%w: %s has been dropped from %s", ErrNoSpace, p.key, r.Path)
		}
		r.Extend(slot, p.rank, need)
		r.leaving.Wake()
		return nil
	}
	w := reservation{Want: r.want(tenant, need), reuseFor: p, enter: enter}
	if err := r.owner.reserve(ctx, w); err != nil {
		return p.shed(err)
	}
	return nil
}

// shed abandons a reservation, and the file that it may have got from a victim.
func (p *Put) shed(cause error) error {
	r := p.root
	if !errors.Is(cause, moves.ErrBehind) {
		r.Counted(&r.Count.Sheds)
	}
	p.release()
	r.budget.Refund(&p.charge)
	return cause
}
