package swap

import (
	"context"
	"fmt"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/policy/shadow"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/evictor"
	"github.com/kvhost/kvhost/host/internal/store/settings"
)

// Reload makes the policies and shadows those of a configuration, and the roots as large as it says, under load. A policy
// that acts already goes on, unless its root gets another size: then a new instance of it takes over. Everything that can
// fail is done while the old ones still act. When something fails, all is as before. commit changes the roots' sizes when all
// policies have taken over. Reload waits for scans, until the context is done.
func (s *Store) Reload(ctx context.Context, next *settings.Config, commit func([]evictor.Size)) (taken []Taken, err error) {
	sizes, err := s.sizes(next)
	if err != nil {
		return nil, err
	}
	begun := s.Now()
	var changes []Handover
	defer func() {
		for _, c := range changes {
			c.Abandon()
		}
	}()
	for i, r := range s.Roots {
		from, size := r.Policy(), sizes[i]
		to, evict := from, next.Roots[i].Evict
		if evict == nil {
			evict = next.Policies.Evict
		}
		if !acts(from, evict) {
			to = s.Evict(evict)
			defer to.Release()
		} else if size == evictor.SizeOf(r.Evictor) {
			continue
		}
		c, err := evictor.PrepareSize(ctx, r.Evictor, to, from, &size)
		if err != nil {
			return nil, fmt.Errorf("store: root %s: policy %s: %w", r.Path, to.Label, err)
		}
		changes = append(changes, Handover{c, r})
	}
	var wishes []shadow.Wish
	for _, h := range next.Policies.Shadows {
		wishes = append(wishes, next.Wish(h))
	}
	shadows, err := s.Shadows.Prepare(ctx, wishes, begun)
	if err != nil {
		shadows.Abandon()
		return nil, fmt.Errorf("store: %w", err)
	}
	if err := s.Catalog.Lock(ctx); err != nil { // what is announced and planned below is all there is
		shadows.Abandon()
		return nil, err
	}
	defer s.Catalog.Unlock()
	p := &next.Policies
	rest, err := s.Catalog.PrepareRebind(ctx,
		&catalog.Policies{Admit: p.Admit, Place: p.Place, Layout: p.Layout, Rules: p.Rules}, evictor.MaxHandoverState)
	if err == nil {
		all := changes
		changes = nil
		if taken, err = TakeAll(all); err == nil {
			commit(sizes)
			shadows.Commit()
			return s.keep(taken, all, rest, begun), nil
		}
	} else {
		err = fmt.Errorf("store: %w", err)
	}
	shadows.Abandon()
	rest.Abandon()
	return nil, err
}

// sizes are those that the roots are to have. A root keeps the slots that it has.
func (s *Store) sizes(next *settings.Config) (list []evictor.Size, err error) {
	if len(next.Roots) != len(s.Roots) {
		return nil, fmt.Errorf("%w: %d roots in place of %d", settings.ErrConfig, len(next.Roots), len(s.Roots))
	}
	for i, r := range s.Roots {
		c := &next.Roots[i]
		size := evictor.Size{Slots: max(c.MaxEntries, evictor.SizeOf(r.Evictor).Slots), Capacity: c.Capacity}
		if reach := r.Reach(); c.Path != r.Path || size.Slots > reach {
			return nil, fmt.Errorf("%w: root %s of %d bytes and %d entries in place of %s, which can have %d entries until a restart",
				settings.ErrConfig, c.Path, c.Capacity, size.Slots, r.Path, reach)
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
