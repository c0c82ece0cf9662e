package store

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/internal/store/moves"
)

// hierarchyOf returns the levels of a configuration. Their roots are not open yet.
func hierarchyOf(s *Store) (h hierarchy) {
	for number := range MaxLevels {
		l := &level{store: s, number: number}
		var lent, shared, remote bool
		for i := range s.cfg.Roots {
			if r := &s.cfg.Roots[i]; r.Level == number {
				l.places = append(l.places, uint32(i))
				lent, shared, remote = lent || r.Lender != nil, shared || r.Shared, remote || r.Remote
			}
		}
		if len(l.places) == 0 {
			continue
		}
		if h.levels = append(h.levels, l); lent {
			h.beyond = l
			continue
		}
		if !remote {
			h.lent = append(h.lent, l)
		}
		if h.offered = l; shared || remote {
			h.offered = nil
		}
	}
	if h.beyond == nil {
		h.offered = nil
	}
	return h
}

// onward returns this level and the own levels behind it.
func (l *level) onward() []*level {
	own := l.store.own()
	return own[slices.Index(own, l):]
}

// below returns the next own level, or nil.
func (l *level) below() *level {
	if l == l.store.beyond || len(l.onward()) == 1 {
		return nil
	}
	return l.onward()[1]
}

// choose returns the root for a new entry in the level, among the roots that take stores. It prefers the place policy's choice,
// then the root with the most room. A full root is chosen only if there is no other.
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

// countCopies finds entries with copies in several roots, so that readers of changes see a removal only when the last copy is
// gone.
func countCopies(s *Store) {
	if s.copies == nil {
		return
	}
	var sets []*entries.Set
	for _, r := range s.ours() {
		sets = append(sets, &r.Set)
	}
	entries.CountCopies(sets)
}

// ways returns the levels to which an entry may be copied. An entry that leaves its level may go beyond the next level, as a
// new entry may.
func (l *level) ways(e *moves.Entry) []*level {
	if e.Leaves() {
		return l.onward()
	}
	return l.onward()[:1]
}

// DropPart implements [moves.Level].
func (l *level) DropPart(e *moves.Entry) {
	for _, way := range l.ways(e) {
		for _, r := range way.roots {
			if m, ok := r.Part(e.Fingerprint); ok {
				r.drop(m)
			}
		}
	}
}

// Settle is for tests. It waits until all entries that are due have left, and no move is under way.
func (s *Store) Settle(ctx context.Context) error {
	if s.mover == nil {
		return nil
	}
	return s.mover.Settle(ctx, s.leave)
}

// leave makes entries leave as far as due. An arrived copy may let other entries leave.
func (s *Store) leave() {
	for _, r := range s.roots {
		r.leaving.Step()
	}
}

// Step makes entries leave as far as due, and makes the most valuable copy of those that wait for a level or leave it for a nearer
// one: see [moves.Mover.Next]. It takes the place of the background work in a store with [Config.Stepped].
func (s *Store) Step(ctx context.Context, level int) (e *moves.Entry, copied int64, end func()) {
	if s.mover == nil {
		return nil, 0, nil
	}
	s.leave()
	v, copied, end := s.mover.Next(ctx, level)
	e, _ = v.(*moves.Entry)
	return e, copied, end
}

// drain copies the entries that volatile roots would lose to the next level, within a time limit.
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

// drain copies the entries that the root would lose to the next level.
func (r *root) drain(ctx context.Context) {
	if !r.cfg.Volatile || r.leaving.To == nil || r.leaving.Peers || !r.Health.Serves() {
		return
	}
	kept, left := r.leaving.Drain(ctx)
	log := r.Log.Info
	if left > 0 {
		log = r.Log.Warn
	}
	log("the root's chunks were copied to the next level", "entries", kept, "left", left, "to_level", r.leaving.To.Number(), "setting",
		"move.shutdown")
}

// keep copies an entry to the next level if the root is configured to write at this time.
func (r *root) keep(m entries.Mark, on Write) {
	if r.cfg.Write >= on && r.leaving.To != nil && !r.leaving.Peers && !r.store.copies.Several(m.Fingerprint) {
		r.leaving.Through(m)
	}
}

// of returns the configuration of the mover between the levels of a store.
func (m Moves) of(s *Store) moves.Config {
	c := moves.Config{Workers: m.Workers, Bandwidth: m.Bandwidth, Waiting: m.Waiting, Loads: &s.loads, Now: s.cfg.Now}
	for _, l := range s.levels[1:] {
		c.Levels = append(c.Levels, l.number)
	}
	if s.offered != nil {
		c.Levels = append(c.Levels, MaxLevels) // see peerLevel
	}
	return c
}

// saidEvery is the shortest interval of that message.
const saidEvery = time.Minute

// sayShed logs that entries of the level left without a copy in the next level, or that copies were shed.
func (l *level) sayShed() {
	below, now := l.below(), l.store.cfg.Now()
	if below == nil || now.Before(l.said.next) {
		return
	}
	gone, waits := below.count[moves.Demotion].Shed.Load(), below.count[moves.Through].Shed.Load()
	if gone+waits == l.said.shed {
		return
	}
	l.said = saying{now.Add(saidEvery), gone + waits}
	all, kept := l.kept()
	l.store.log.Warn("copies to the next level are shed: it takes fewer bytes than are stored; see move.bandwidth and move.workers",
		"to_level", below.number, "gone", gone, "shed", waits, "in_memory", all, "of_these_kept", kept)
}

// kept counts the entries that the level has in memory, and those of them with a copy in another level, which outlives the
// host.
func (l *level) kept() (volatile, kept uint64) {
	for _, r := range l.roots {
		if r.cfg.Volatile {
			r.Lock()
			volatile += uint64(r.Complete())
			r.Unlock()
		}
	}
	if volatile > 0 && l.store.copies != nil {
		kept = min(volatile, uint64(l.store.copies.Kept()))
	}
	return volatile, kept
}

// elsewhere sets the facts of a candidate that concern other hosts.
func (s *Store) elsewhere(c *abi.Candidate) {
	if own := s.own(); own[len(own)-1].number == int(c.To) {
		c.Flags |= abi.CandidateLast
	}
	l := s.cfg.lender
	if l == nil {
		return
	}
	c.Copies = uint32(l.Copies(c.Key))
	for _, level := range [...]*uint8{&c.From, &c.To} {
		if *level != abi.NoLevel && int(*level) >= s.beyond.number {
			*level = abi.PeerLevel
		}
	}
}

// bringNear offers the root's level as many of the early entries as it has room for now.
func (r *root) bringNear() {
	for room := r.ready(); room > 0; {
		m, from := r.level.early.latest()
		if m == nil {
			return
		}
		v := &moves.Entry{Move: m, Kind: moves.Promotion, From: from, To: r.level, Wanted: true}
		if !v.Offer(r.store.mover) {
			if !r.level.Holds(m.Fingerprint) { // too many entries are waiting
				r.level.early.add(early{from, m.Mark})
			}
			return
		}
		room -= v.Bytes()
	}
}
