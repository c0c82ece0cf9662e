package store

import (
	"context"
	"fmt"

	"github.com/kvhost/kvhost/host/store/entries"
	"github.com/kvhost/kvhost/host/store/evictor"
	"github.com/kvhost/kvhost/host/store/swap"
)

// Reload takes policies, shadows, quotas, watermarks, limits of moves, and each root's capacity, free space and write budget
// from another configuration. When anything fails, all is as before. A root that is too small afterwards stores nothing
// until its own work has evicted what is too much. Reload waits for scans.
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

// Current is the configuration, with what Reload has changed.
func (s *Store) Current() *Config { return s.live.Load() }

func setBudgets(s *Store, c *Config) error {
	if len(c.Roots) != len(s.roots) {
		return fmt.Errorf("%w: %d roots in place of %d", ErrConfig, len(c.Roots), len(s.roots))
	}
	for i, r := range s.roots {
		if err := r.budget.SetDaily(c.Roots[i].DailyWrites); err != nil {
			return fmt.Errorf("store: root %s: %w", r.Path, err)
		}
	}
	return nil
}

// commit changes the limits.
func commit(s *Store, next *Config, sizes []evictor.Size) {
	live := s.cfg
	live.Roots, live.Quotas, live.High, live.Low, live.Moves = next.Roots, next.Quotas, next.High, next.Low, next.Moves
	s.live.Store(&live)
	s.mover.SetLimits(live.Moves.Bandwidth, live.Moves.Waiting)
	for i, r := range s.roots {
		entries.Raise(&r.Set, sizes[i].Slots)
		r.Account.SetBounds(live.Roots[i].Bounds())
		r.Quarantine.SetBytes(live.Roots[i].Capacity / quarantineShare)
		wake(r.evictorWake)
		wake(r.upkeepWake)
	}
}
