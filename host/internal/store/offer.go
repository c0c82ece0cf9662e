package store

import (
	"context"
	"time"

	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/internal/store/moves"
	"github.com/kvhost/kvhost/host/kv"
)

// offers reports whether the root offers evicted entries to another host, and takes such offers. This is so in the last own
// level, unless other hosts reach it just as fast.
func (r *root) offers() bool { return r.level == r.store.offered }

// replaced counts bytes that were evicted from the level.
func (l *level) replaced(bytes int64) {
	_, content := l.room()
	l.turnover.mu.Lock()
	defer l.turnover.mu.Unlock()
	l.turnover.Replaced(bytes, content, time.Duration(l.store.seq.Clock()))
}

func (l *level) room() (free, capacity int64) {
	for _, r := range l.roots {
		a := r.Account.Figures()
		free, capacity = free+max(0, a.Limit-a.Used), capacity+a.Capacity
	}
	return free, capacity
}

// Turnover returns the time in which the last own level replaces its content. It is 0 if the level makes no offers and takes
// none.
func (s *Store) Turnover() time.Duration {
	l := s.offered
	if l == nil {
		return 0
	}
	free, capacity := l.room()
	if policy.HasRoom(free, capacity) {
		return policy.Endless
	}
	l.turnover.mu.Lock()
	defer l.turnover.mu.Unlock()
	return max(1, l.turnover.Of(capacity, time.Duration(s.seq.Clock())))
}

// peerLevel is the level of other hosts as the destination of offers. It implements [moves.Taker].
type peerLevel struct{ *level }

// Number implements [moves.Level]. Its number is separate from that of borrowed entries, so that offers do not occupy the
// workers of loans and of taken entries, for which another host may wait.
func (l *peerLevel) Number() int { return MaxLevels }

// DropPart implements [moves.Level]. There is nothing to drop on this host.
func (l *peerLevel) DropPart(*moves.Entry) {}

// Take implements [moves.Taker].
func (l *peerLevel) Take(ctx context.Context, e *moves.Entry) error {
	for place, r := range l.store.roots {
		if e.From != &r.origin {
			continue
		}
		o := Offer{Lease: &Lease{store: l.store, hits: 1, grants: []grant{{Fingerprint: e.Fingerprint, Slot: e.Slot, Root: uint32(place)}}}}
		r.Lock()
		class := r.ClassOf(e.Slot)
		o.Namespace, o.Group, o.Key, o.Tenant, o.Ranks = class.Namespace.Digest, class.Group, r.Index.Key(e.Slot), r.TenantOf(e.Slot), e.Pieces
		r.Index.Pin(e.Slot) // the policy knows neither of this pin nor of the move's
		r.Unlock()
		defer o.Lease.Release()
		return l.store.cfg.lender.Offer(ctx, &o)
	}
	return moves.ErrCancelled
}

// Take fetches an entry that another host offers and lends to the last own level. It reports whether it did. The admit policy
// and the mover may refuse the entry.
func (s *Store) Take(ctx context.Context, digest kv.Digest, l *Loan) bool {
	last := s.offered
	l.Namespace = s.catalog.Known(digest)
	if last == nil || l.Namespace == nil || l.Namespace.Class(l.Group) == nil {
		return false
	}
	if !s.catalog.Tenants.Has(l.Tenant) { // the copy gets the tenant of the piece when the piece has been verified
		l.Tenant = catalog.UnknownTenant
	}
	list, err := s.Borrow(l)
	if err != nil || len(list) == 0 {
		return false
	}
	defer s.GiveBack(list, true)
	var m *entries.Move
	from := s.beyond.roots[0]
	from.Lock()
	if from.Stands(list[0]) {
		m = from.Moves.Copy(list[0].Slot)
	}
	from.Unlock()
	if m == nil {
		return false
	}
	over, took := make(chan struct{}), false
	v := &moves.Entry{Move: m, Kind: moves.Taken, From: &from.origin, To: last, Then: func() { took = true }, Ended: func() { close(over) }}
	if !v.Offer(s.mover) {
		return false
	}
	select {
	case <-ctx.Done():
		v.Cancel()
		s.mover.Prune()
		<-over
	case <-over:
	}
	if !took {
		return false
	}
	for _, r := range last.roots {
		r.Lock()
		if r.Has(m.Fingerprint, index.Complete) {
			r.Hits.Take(r.Index.FindFingerprint(m.Fingerprint), r.Index.High())
		}
		r.Unlock()
	}
	return true
}
