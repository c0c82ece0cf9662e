package store

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/policy/shadow"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/evictor"
)

// Swap describes a change of policies during operation.
type Swap struct {
	From     string                    // name of the policy to replace; empty for an evict policy with any name
	Policies [abi.Roles]*policy.Handle // new policies by role, borrowed; nil for roles without a change
	Root     string                    // root in which evict is changed; empty for every root with the policy From
}

// Taken describes one change of a policy that has taken effect.
type Taken struct {
	Role     abi.Role
	Root     string         // root of an evict policy
	From     string         // digest of the old module
	Handover evictor.Method // way in which the new policy learned of the entries
	Entries  int            // number of entries in the root, for evict
	Took     time.Duration
}

// Swap replaces policies during operation. All steps that can fail are done while the old policies are still in use. If one
// fails in any root, nothing changes. Swap waits for scans until the context is done.
func (s *Store) Swap(ctx context.Context, w Swap) (taken []Taken, err error) {
	err = s.changing(ctx, func() error {
		begun := s.cfg.Now()
		var changes []handover
		if h := w.Policies[abi.RoleEvict]; h != nil {
			to := s.evictPolicy(h)
			defer to.Release()
			if changes, err = s.prepareEvict(ctx, &w, to); err != nil {
				abandon(changes)
				return err
			}
		}
		taken, err = s.replace(ctx, begun, changes, func() (*catalog.Swap, error) {
			return s.catalog.PrepareSwap(ctx, w.From, &w.Policies, evictor.MaxHandoverState)
		})
		return err
	})
	return taken, err
}

// changing makes a change and excludes other changes.
func (s *Store) changing(ctx context.Context, change func() error) error {
	if err := s.swapping.Acquire(ctx, 1); err != nil {
		return err
	}
	defer s.swapping.Release(1)
	if s.closed.Load() {
		return ErrClosed
	}
	return change()
}

// replace puts prepared policies into use. changes has the policies of roots, and bind prepares the policies of namespaces. Either
// all of them take over or none.
func (s *Store) replace(
	ctx context.Context, begun time.Time, changes []handover, bind func() (*catalog.Swap, error),
) (taken []Taken, err error) {
	if err := s.catalog.Lock(ctx); err != nil { // no namespace or plan can be added from here on
		abandon(changes)
		return nil, err
	}
	defer s.catalog.Unlock()
	rest, err := bind()
	if err != nil {
		err = fmt.Errorf("store: %w", err)
	}
	for i := 0; i < len(changes) && err == nil; i++ {
		c := &changes[i]
		if unready := c.Ready(); unready != nil {
			err = fmt.Errorf("store: root %s: policy %s: %w", c.r.Path, c.To.Label, unready)
		}
	}
	if err != nil {
		rest.Abandon()
		abandon(changes)
		return nil, err
	}
	for _, c := range changes {
		taken = append(taken, Taken{
			Role: abi.RoleEvict, Root: c.r.Path, From: c.From.Module.Digest(), Handover: c.Method, Entries: c.Finish(),
		})
	}
	for _, t := range rest.Commit() {
		how := evictor.Replayed
		if t.Loaded {
			how = evictor.Loaded
		}
		taken = append(taken, Taken{Role: t.Role, From: t.From, Handover: how})
	}
	for i := range taken {
		taken[i].Took = s.cfg.Now().Sub(begun)
	}
	return taken, nil
}

// prepareEvict prepares an evict policy for its roots. After an error it also returns the roots that are prepared.
func (s *Store) prepareEvict(ctx context.Context, w *Swap, to *evictor.Policy) (changes []handover, err error) {
	for _, r := range s.ours() {
		from := r.Policy()
		if w.Root != "" && w.Root != r.Path || w.From != "" && w.From != from.Label {
			continue
		}
		c, err := r.Evictor.Prepare(ctx, to, from)
		if err != nil {
			return changes, fmt.Errorf("store: root %s: policy %s: %w", r.Path, to.Label, err)
		}
		changes = append(changes, handover{c, r})
	}
	if len(changes) == 0 {
		return nil, fmt.Errorf("%w: evict policy %s", catalog.ErrNoPolicy, cmp.Or(w.From, "of root "+w.Root))
	}
	return changes, nil
}

// handover is the handover of an evict policy in one root.
type handover struct {
	*evictor.Handover
	r *root
}

func abandon(changes []handover) {
	for _, c := range changes {
		c.Abandon()
	}
}

// Reload applies the policies, shadows, quotas and bounds of roots from another configuration, or nothing. A root that becomes
// too small stores nothing until its upkeep has evicted the excess. Reload waits for scans until the context is done.
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
		_ = s.setBudgets(s.live.Load()) // cannot fail: the files have been read before
	}
	return taken, err
}

// reload applies a configuration's policies, shadows and root sizes. A policy that is in use already continues. If the size of
// its root changes, a new instance takes over. All steps that can fail are done while the old policies are still in use.
func (s *Store) reload(ctx context.Context, next *Config) (taken []Taken, err error) {
	sizes, err := s.sizes(next)
	if err != nil {
		return nil, err
	}
	begun := s.cfg.Now()
	var changes []handover
	for i, r := range s.roots {
		from, size := r.Policy(), sizes[i]
		to, evict := from, next.evicts(&next.Roots[i])
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

// sizes returns the new sizes of the roots. A root keeps at least the slots that it has.
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

// acts reports whether now is the policy that the configuration asks for. wanted is nil for the built-in policy.
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

// addShadow starts a shadow. Its name must be unique among the shadows.
func (s *Store) addShadow(ctx context.Context, h Shadow) error {
	if s.shadows.Has(h.Policy.Label) {
		return fmt.Errorf("store: shadow %s: %w: there is one of that name", h.Policy.Label, ErrConfig)
	}
	return s.startShadow(ctx, h)
}

// SwapShadow starts a shadow in place of the one with the same name. If that fails, the old one keeps running.
func (s *Store) SwapShadow(ctx context.Context, h Shadow) error {
	return s.changing(ctx, func() error {
		if !s.shadows.Has(h.Policy.Label) {
			return fmt.Errorf("store: shadow %s: %w", h.Policy.Label, ErrNoPolicy)
		}
		return s.startShadow(ctx, h)
	})
}

func (s *Store) startShadow(ctx context.Context, h Shadow) error {
	w := s.live.Load().wish(h)
	if err := s.shadows.Start(ctx, w.Policy.Acquire(), s.cfg.Now(), w.Options); err != nil {
		return fmt.Errorf("store: shadow %s: %w", h.Policy.Label, err)
	}
	return nil
}

func (s *Store) RemoveShadow(name string) error {
	return s.changing(context.Background(), func() error {
		if !s.shadows.End(name) {
			return fmt.Errorf("%w: shadow %s", ErrNoPolicy, name)
		}
		return nil
	})
}
