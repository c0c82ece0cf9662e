package moves

import (
	"context"
	"slices"

	"github.com/kvhost/kvhost/host/internal/store/index"
)

// Drain offers what the root holds to the next level, the most recently used prefixes first, until the context is done.
// It returns how many entries have a copy there, and how many have none although the level wants them. Nobody else
// uses the root.
func (l *Leaving) Drain(ctx context.Context) (kept, left int) {
	count := l.To.Count()
	before := count[Demotion].Done.Load() + count[Demotion].Cancelled.Load()
	offered := 0
	for _, slot := range l.order() {
		if l.Mover.wait(ctx, l.Mover.cfg.Waiting/2) != nil {
			left++
			continue
		}
		l.From.Lock()
		m := l.From.Moves.Copy(slot)
		l.From.Unlock()
		if m == nil {
			continue
		}
		if (&Entry{Move: m, Kind: Demotion, From: l.From, To: l.To}).Offer(l.Mover) {
			offered++
		}
	}
	_ = l.Mover.wait(ctx, 0)
	waiting, _ := l.Mover.InFlight()
	after := count[Demotion].Done.Load() + count[Demotion].Cancelled.Load()
	return int(after - before), left + min(waiting, offered)
}

// order lists the slots of entries: the most recently used first, but each after the entries that it continues.
func (l *Leaving) order() (list []uint32) {
	s := l.From.Set
	s.Lock()
	defer s.Unlock()
	recent := s.Index.ByLastTouch()
	slices.Reverse(recent)
	listed := make(map[uint32]bool, len(recent))
	var chain []uint32
	for _, slot := range recent {
		for chain = chain[:0]; slot != index.None && !listed[slot]; {
			listed[slot] = true
			chain = append(chain, slot)
			slot = s.Index.FindFingerprint(s.Index.At(slot).Parent())
		}
		slices.Reverse(chain)
		list = append(list, chain...)
	}
	return list
}
