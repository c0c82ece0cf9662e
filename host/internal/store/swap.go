package store

import (
	"context"

	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/swap"
)

// Swap is a change of policies while the store is at work.
type Swap = swap.Swap

// Taken is one place that a policy took over.
type Taken = swap.Taken

// Swap replaces policies under load. When something fails, also at the last moment in one of the roots, all is as before.
// It waits for scans, until the context is done.
func (s *Store) Swap(ctx context.Context, w Swap) (taken []Taken, err error) {
	err = changing(ctx, s, func(by *swap.Store) (err error) { taken, err = by.Do(ctx, w); return err })
	return taken, err
}

// changing makes a change while no other one is made.
func changing(ctx context.Context, s *Store, change func(by *swap.Store) error) error {
	if err := s.swapping.Acquire(ctx, 1); err != nil {
		return err
	}
	defer s.swapping.Release(1)
	if s.closed.Load() {
		return ErrClosed
	}
	return change(swapper(s))
}

func swapper(s *Store) *swap.Store {
	w := &swap.Store{Catalog: s.catalog, Shadows: &s.shadows, Now: s.cfg.Now, Evict: s.evictPolicy}
	for _, r := range s.roots {
		w.Roots = append(w.Roots, swap.Root{Path: r.Path, Evictor: r.Evictor, Policy: r.Policy, Reach: func() uint32 { return entries.Reach(&r.Set) }})
	}
	return w
}
