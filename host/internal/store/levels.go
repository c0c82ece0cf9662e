package store

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/internal/store/moves"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
)

// level is the roots that are equally near. An entry may have a copy in each level. It implements [moves.Level].
type level struct {
	store  *Store
	number int      // as configured
	places []uint32 // of the roots, in the configuration
	roots  []*root
	count  moves.Counters // of moves to it
	said   saying         // by the upkeep of the first root
	early  earlies        // entries that are farther away because memory was being allocated
	hits   atomic.Uint64  // keys granted
	loaded atomic.Uint64  // bytes of pieces that were opened for loads
}

// levelsOf are the levels of a store, nearest first. Their roots are not open yet.
func levelsOf(s *Store) (list []*level) {
	for number := range MaxLevels {
		l := &level{store: s, number: number}
		for i, r := range s.cfg.Roots {
			if r.Level == number {
				l.places = append(l.places, uint32(i))
			}
		}
		if len(l.places) > 0 {
			list = append(list, l)
		}
	}
	return list
}

// below is the next level, or nil.
func (l *level) below() *level {
	if n := slices.Index(l.store.own, l) + 1; n > 0 && n < len(l.store.own) {
		return l.store.own[n]
	}
	return nil
}

// sortLevels says which levels take stores, which of these other hosts may borrow from, and which one is offered what others evict: the
// last one, unless other hosts reach it as soon themselves.
func (s *Store) sortLevels() {
	for _, l := range s.levels {
		var lent, shared, remote bool
		for _, i := range l.places {
			r := &s.cfg.Roots[i]
			lent, shared, remote = lent || r.Lender != nil, shared || r.Shared, remote || r.Remote
		}
		if lent {
			s.beyond = l
			continue
		}
		s.own = append(s.own, l)
		if !remote {
			s.lent = append(s.lent, l)
		}
		if s.offered = l; shared || remote {
			s.offered = nil
		}
	}
	if s.beyond == nil {
		s.offered = nil
	}
}

// levelOf is the level of a root that is configured.
func levelOf(s *Store, cfg *RootConfig) *level {
	return s.levels[slices.IndexFunc(s.levels, func(l *level) bool { return l.number == cfg.Level })]
}

// choose is the root of a new entry in the level: the place policy's choice, if it is of the level, or the one with
// most room, among those that take stores. One that is full is chosen when there is no other.
func (l *level) choose(chosen uint32) (*root, error) {
	at := slices.Index(l.places, chosen)
	only := len(l.roots) == 1
	if only {
		at = 0
	}
	if at >= 0 && (l.roots[at].invites() || only && l.roots[at].Health.Takes()) {
		return l.roots[at], nil
	}
	var best *root
	var most float64
	for _, r := range l.roots {
		state := r.Health.State()
		if state > health.Full {
			continue
		}
		share := r.Account.Free()
		if !r.invites() {
			share -= 2 + float64(state)
		}
		if best == nil || share > most {
			best, most = r, share
		}
	}
	if best == nil {
		return nil, fmt.Errorf("%w: %d of %d; the last is %w", ErrRootOut, len(l.roots), len(l.roots),
			l.roots[len(l.roots)-1].Health.OutError())
	}
	return best, nil
}

// Number implements [moves.Level].
func (l *level) Number() int { return l.number }

// Count implements [moves.Level].
func (l *level) Count() *moves.Counters { return &l.count }

// Facts implements [moves.Level].
func (l *level) Facts(c *abi.Candidate) {
	for _, r := range l.roots {
		if c.Kind == abi.KindPromotion && r.invites() && r.ready() >= int64(c.Size)*abi.SizeUnit {
			c.Flags |= abi.CandidateRoom
		}
	}
	const all = abi.CandidateContinued | abi.CandidateParentResident
	for _, r := range l.store.roots {
		serves := r.Health.Serves()
		r.Lock()
		if r.Continued(c.Key) {
			c.Flags |= abi.CandidateContinued
		}
		if c.ParentKey != 0 && serves && r.Has(c.ParentKey, index.Live) {
			c.Flags |= abi.CandidateParentResident
		}
		r.Unlock()
		if c.Flags&all == all {
			break
		}
	}
	l.store.elsewhere(c)
}

// Holds implements [moves.Level].
func (l *level) Holds(fp uint64) bool { return holds(l.roots, fp, index.Complete) }

// Admits implements [moves.Level].
func (l *level) Admits(c *abi.Candidate, ns *catalog.Namespace) (admitted, asked bool) {
	if ns.Admit.Now().Levels&(1<<l.number) == 0 {
		return false, false
	}
	answer := []bool{false}
	if err := ns.Admits([]abi.Candidate{*c}, answer); err != nil {
		l.store.admissionFault(err)
		return false, false
	}
	return answer[0], true
}

// Log implements [moves.Level].
func (l *level) Log(e *moves.Entry, cause error) {
	l.store.log.Debug("an entry is not copied to another level", "kind", e.Kind, "to_level", l.number, "error", cause)
}

// countCopies finds entries with copies in several roots, so that readers of changes get the last one's end.
func countCopies(s *Store) {
	if s.copies == nil {
		return
	}
	var sets []*entries.Set
	for _, r := range s.ours {
		sets = append(sets, &r.Set)
	}
	entries.CountCopies(sets)
}

// What package moves copies is read as by a load and written as by a put.

// copyOf marks the put of a piece that is copied.
type copyOf struct {
	entry  *moves.Entry
	header *pieceformat.Header
	level  *level
}

// movedPiece is a piece that is copied.
type movedPiece struct{ *Piece }

func (p movedPiece) ReadAt(b []byte, off int64) (int, error) { return p.file.ReadAt(b, off) }
func (p movedPiece) Cancelled() bool                         { return p.move.Cancelled() }

// openMoved opens a piece of an entry that is pinned.
func (r *root) openMoved(m *entries.Move, rank uint32) (moves.Piece, error) {
	p := &Piece{root: r, mark: m.Mark, rank: rank, move: m}
	if err := p.pin(); err != nil {
		return nil, err
	}
	if err := p.open(); err != nil {
		p.Close()
		return nil, err
	}
	return movedPiece{p}, nil
}

// movedTo is the put of a piece that is copied.
type movedTo struct {
	staging.File
	*Put
	decodes bool
}

// Decodes says whether compressed pieces come as version 1: memory from which plain ones are loaded faster holds those.
func (t movedTo) Decodes() bool { return t.decodes }

// Name is the one that the place policy gave the copy.
func (t movedTo) Name() string { return t.Put.name }

func (t movedTo) Commit(ctx context.Context) error { return t.Publish(ctx) }

// Begin implements [moves.Level].
func (l *level) Begin(ctx context.Context, e *moves.Entry, h *pieceformat.Header) (moves.Target, error) {
	put, err := l.store.Put(ctx, PutRequest{
		Namespace: e.Namespace, Group: h.Group, Parent: h.Parent, Key: h.Key, Depth: h.Depth, Rank: h.Rank, Ranks: e.Pieces,
		Tenant: h.Tenant, copy: &copyOf{e, h, l},
	})
	if errors.Is(err, moves.ErrBehind) { // what it waits for is offered before it is tried again
		for _, r := range l.roots {
			r.leaving.Step()
		}
	}
	if err != nil {
		return nil, err
	}
	f, err := put.File()
	if err != nil {
		put.Abort(err)
		return nil, err
	}
	r := put.root
	decodes := r.cfg.Volatile && !(r.cfg.Compressed && put.class.Namespace.Compression.Keeps(r.meter.gain))
	if put.size = h.FileBytes(); decodes {
		put.size = pieceformat.FileBytes(put.class.Plan)
	}
	return movedTo{f, put, decodes}, nil
}

// ways are the levels that the copy of an entry may go to: what leaves may go beyond the next one, as what is new.
func (l *level) ways(e *moves.Entry) []*level {
	at := slices.Index(l.store.own, l)
	if e.Leaves() {
		return l.store.own[at:]
	}
	return l.store.own[at : at+1]
}

// DropPart implements [moves.Level].
func (l *level) DropPart(e *moves.Entry) {
	for _, way := range l.ways(e) {
		for _, r := range way.roots {
			if m, ok := r.Part(e.Fingerprint); ok {
				r.drop(m, 0)
			}
		}
	}
}

// Settle is for tests: it waits until everything has left that is to leave, and no move is under way.
func (s *Store) Settle(ctx context.Context) error {
	if s.mover == nil {
		return nil
	}
	return s.mover.Settle(ctx, func() {
		for _, r := range s.roots {
			r.leaving.Step() // a copy that came may let others leave
		}
	})
}

// drain copies to the next level what roots would lose, within a time.
func (s *Store) drain(limit time.Duration) {
	if s.mover == nil || limit <= 0 {
		return
	}
	ctx, cancel := context.WithTimeout(s.run, limit)
	defer cancel()
	s.mover.Hurry()
	for _, r := range s.roots {
		r.drain(ctx)
	}
}

// drain copies to the next level what the root would lose.
func (r *root) drain(ctx context.Context) {
	if !r.cfg.Volatile || r.leaving.To == nil || r.leaving.Peers || !r.Health.Serves() {
		return
	}
	kept, left := r.leaving.Drain(ctx)
	log := r.Log.Info
	if left > 0 {
		log = r.Log.Warn
	}
	log("what the root held was copied to the next level", "entries", kept, "left", left, "to_level", r.leaving.To.Number(), "setting",
		"move.shutdown")
}

// keep copies an entry to the next level where the root writes that soon.
func (r *root) keep(m entries.Mark, on Write) {
	if r.cfg.Write >= on && r.leaving.To != nil && !r.leaving.Peers && !r.store.copies.Several(m.Fingerprint) {
		r.leaving.Through(m)
	}
}

// offer offers a copy of the i-th entry of a lease to the nearest level, unless it is from there, or moves already.
func (l *Lease) offer(i int, kind moves.Kind) *moves.Entry {
	nearest, g := l.store.levels[0], l.grants[i]
	if g.Slot == index.None || l.store.roots[g.Root].level == nearest {
		return nil
	}
	r := l.store.roots[g.Root]
	r.Lock()
	m := r.Moves.Copy(g.Slot)
	r.Unlock()
	if m == nil {
		return nil
	}
	v := &moves.Entry{Move: m, Kind: kind, From: &r.origin, To: nearest}
	if kind == moves.Prefetch {
		v.Then = func() { l.came(i, nearest, true) }
	}
	if !v.Offer(l.store.mover) {
		return nil
	}
	return v
}

// promote offers what a lease was granted in farther levels to the nearest one, also where computing it was as fast as loading it from there,
// and what was loaded from the nearest to the next. The pins are still the lease's.
func (l *Lease) promote(loaded bool) {
	if len(l.store.levels) < 2 {
		return
	}
	for i, g := range l.grants {
		if g.Slot == index.None {
			continue
		}
		if r := l.store.roots[g.Root]; r.level != l.store.levels[0] {
			l.offer(i, moves.Promotion)
		} else if loaded {
			r.keep(entries.Mark{Slot: g.Slot, Fingerprint: g.Fingerprint}, WriteHits)
		}
	}
}

// prefetch asks for copies in the nearest level of what a new lease has in farther ones. The lease gets each when it is
// there, and loads what has no copy yet from where it was found.
func (l *Lease) prefetch() {
	for i := range l.grants {
		v := l.offer(i, moves.Prefetch)
		if v == nil {
			continue
		}
		l.mu.Lock()
		if l.coming == nil {
			l.coming = map[int]*moves.Entry{}
		}
		l.coming[i] = v
		l.mu.Unlock()
	}
}

// endPrefetch cancels the copies that have not come.
func (l *Lease) endPrefetch(coming map[int]*moves.Entry) {
	if len(coming) == 0 {
		return
	}
	for _, v := range coming {
		v.Cancel()
	}
	l.store.mover.Prune()
}

// came pins a copy of the i-th entry in a level for the lease, while that lasts and has no nearer one. It says whether it
// did.
func (l *Lease) came(i int, to *level, prefetched bool) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if prefetched {
		delete(l.coming, i)
	}
	_, has := l.near[i]
	fp := l.grants[i].Fingerprint
	for _, place := range to.places {
		r := l.store.roots[place]
		if slot, pinned := r.PinCopy(fp, prefetched, !l.over && !has); pinned {
			if l.near == nil {
				l.near = map[int]grant{}
			}
			l.near[i] = grant{Fingerprint: fp, Slot: slot, Root: place}
			return true
		}
	}
	return false
}

// Approach pins the nearest whole copy of the i-th entry, which may have come nearer since the lookup. A load calls it
// before it opens its pieces: that Root says where they are read, and no Open looks through the levels.
func (l *Lease) Approach(i int) {
	if len(l.store.levels) < 2 || !l.Has(i) {
		return
	}
	at := l.store.roots[l.granted(i).Root].level
	for _, level := range l.store.levels {
		if level == at || l.came(i, level, false) {
			return
		}
	}
}

// of is the configuration of the mover between levels.
func (m Moves) of(loads *moves.Loads, levels []*level) moves.Config {
	c := moves.Config{Workers: m.Workers, Bandwidth: m.Bandwidth, Waiting: m.Waiting, Loads: loads}
	for _, l := range levels[1:] {
		c.Levels = append(c.Levels, l.number)
	}
	if levels[0].store.offered != nil {
		c.Levels = append(c.Levels, MaxLevels) // see peerLevel
	}
	return c
}
