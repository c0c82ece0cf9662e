package store

import (
	"context"
	"fmt"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/policy/shadow"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/evictor"
)

// Reload takes policies, shadows, quotas and bounds of roots from another configuration, or nothing. A root that is too small then stores nothing until its own work has evicted what is too much. Reload waits for
// scans, until the context is done.
func (s *Store) Reload(ctx context.Context, next Config) (taken []Taken, err error) {
	if err := next.complete(); err != nil {
		return nil, err
	}
	err = s.changing(ctx, func() error {
		if err := s.setBudgets(&next); err != nil {
			return err
		}
		taken, err = s.reload(ctx, &next)
		return err
	})
	if err != nil {
		_ = s.setBudgets(s.live.Load()) // the files were read before
	}
	return taken, err
}

// reload makes the policies and shadows those of a configuration, and the roots as large as it says. A policy that acts
// already goes on, unless its root gets another size: then a new instance of it takes over. Everything that can fail is done
// while the old ones still act.
func (s *Store) reload(ctx context.Context, next *Config) (taken []Taken, err error) {
	sizes, err := s.sizes(next)
	if err != nil {
		return nil, err
	}
	begun := s.cfg.Now()
	var changes []handover
	for i, r := range s.roots {
		from, size := r.Policy(), sizes[i]
		to, evict := from, next.Roots[i].Evict
		if evict == nil {
			evict = next.Policies.Evict
		}
		if !acts(from, evict) {
			to = s.evictPolicy(evict)
			defer to.Release()
		} else if size == evictor.SizeOf(r.Evictor) {
			continue
		}
		c, err := evictor.PrepareSize(ctx, r.Evictor, to, from, &size)
		if err != nil {
			abandon(changes)
			return nil, fmt.Errorf("store: root %s: policy %s: %w", r.Path, to.Label, err)
		}
		changes = append(changes, handover{c, r})
	}
	var wishes []shadow.Wish
	for _, h := range next.Policies.Shadows {
		wishes = append(wishes, next.wish(h))
	}
	shadows, err := s.shadows.Prepare(ctx, wishes, begun)
	if err != nil {
		shadows.Abandon()
		abandon(changes)
		return nil, fmt.Errorf("store: %w", err)
	}
	p := &next.Policies
	taken, err = s.replace(ctx, begun, changes, func() (*catalog.Swap, error) {
		return s.catalog.PrepareRebind(ctx,
			&catalog.Policies{Admit: p.Admit, Place: p.Place, Layout: p.Layout, Rules: p.Rules}, evictor.MaxHandoverState)
	})
	if err != nil {
		shadows.Abandon()
		return nil, err
	}
	s.commit(next, sizes)
	shadows.Commit()
	return taken, nil
}

// sizes are those that the roots are to have. A root keeps the slots that it has.
func (s *Store) sizes(next *Config) (list []evictor.Size, err error) {
	if len(next.Roots) != len(s.roots) {
		return nil, fmt.Errorf("%w: %d roots in place of %d", ErrConfig, len(next.Roots), len(s.roots))
	}
	for i, r := range s.roots {
		c := &next.Roots[i]
		size := evictor.Size{Slots: max(c.MaxEntries, evictor.SizeOf(r.Evictor).Slots), Capacity: c.Capacity}
		if reach := entries.Reach(&r.Set); c.Path != r.Path || size.Slots > reach {
			return nil, fmt.Errorf("%w: root %s of %d bytes and %d entries in place of %s, which can have %d entries until a restart",
				ErrConfig, c.Path, c.Capacity, size.Slots, r.Path, reach)
		}
		list = append(list, size)
	}
	return list, nil
}

// acts says whether a policy is the one that is wanted.
func acts(now *evictor.Policy, wanted *policy.Handle) bool {
	if wanted == nil {
		return now.Module.Digest() == policy.Builtin(abi.RoleEvict).Digest()
	}
	return now.Handle == wanted
}

func (s *Store) setBudgets(c *Config) error {
	for i, r := range s.roots[:min(len(s.roots), len(c.Roots))] {
		if err := r.budget.SetDaily(c.Roots[i].DailyWrites); err != nil {
			return fmt.Errorf("store: root %s: %w", r.Path, err)
		}
	}
	return nil
}

func (s *Store) commit(next *Config, sizes []evictor.Size) {
	live := s.cfg
	live.Roots, live.Quotas = next.Roots, next.Quotas
	s.live.Store(&live)
	for i, r := range s.roots {
		entries.Raise(&r.Set, sizes[i].Slots)
		r.Account.SetBounds(live.Roots[i].bounds())
		r.Quarantine.SetBytes(live.Roots[i].Capacity / quarantineShare)
		wake(r.upkeepWake)
	}
}
