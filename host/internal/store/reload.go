package store

import (
	"context"
	"fmt"

	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/evictor"
	"github.com/kvhost/kvhost/host/internal/store/swap"
)

// Reload takes policies, quotas, watermarks, limits of moves and bounds of roots from another configuration, or nothing. A
// root that is too small then stores nothing until its own work has evicted what is too much. Reload waits for scans.
func (s *Store) Reload(ctx context.Context, next Config) (taken []Taken, err error) {
	if err := next.Complete(); err != nil {
		return nil, err
	}
	err = changing(ctx, s, func(by *swap.Store) error {
		if err := setBudgets(s, &next); err != nil {
			return err
		}
		taken, err = by.Reload(ctx, &next, func(sizes []evictor.Size) { commit(s, &next, sizes) })
		return err
	})
	if err != nil {
		_ = setBudgets(s, s.live.Load()) // the files were read before
	}
	return taken, err
}

func setBudgets(s *Store, c *Config) error {
	for i, r := range s.roots[:min(len(s.roots), len(c.Roots))] {
		if err := r.budget.SetDaily(c.Roots[i].DailyWrites); err != nil {
			return fmt.Errorf("store: root %s: %w", r.Path, err)
		}
	}
	return nil
}

func commit(s *Store, next *Config, sizes []evictor.Size) {
	live := s.cfg
	live.Roots, live.Quotas, live.High, live.Low, live.Moves = next.Roots, next.Quotas, next.High, next.Low, next.Moves
	s.live.Store(&live)
	s.mover.SetLimits(live.Moves.Bandwidth, live.Moves.Waiting)
	for i, r := range s.roots {
		entries.Raise(&r.Set, sizes[i].Slots)
		r.Account.SetBounds(live.Roots[i].Bounds())
		r.Quarantine.SetBytes(live.Roots[i].Capacity / quarantineShare)
		r.kind.wake()
		wake(r.upkeepWake)
	}
}
