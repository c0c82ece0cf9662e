package store

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/evictor"
)

// Swap is a change of policies while the store is at work.
type Swap struct {
	From     string                    // the policy that is replaced, by name; empty, for evict: whichever acts
	Policies [abi.Roles]*policy.Handle // the new ones, by role, borrowed; nil: the role does not change
	Root     string                    // where evict is changed; empty: in every root where From acts
}

// Taken is one place that a policy took over.
type Taken struct {
	Role     abi.Role
	Root     string         // of evict
	From     string         // the module's digest
	Handover evictor.Method // how it learned what is there
	Entries  int            // of the root, of evict
	Took     time.Duration  // beside the work of all others
}

// Swap replaces policies under load. Everything that can fail is done while the old ones still act. When something fails,
// also at the last moment in one of the roots, all is as before. It waits for scans, until the context is done.
func (s *Store) Swap(ctx context.Context, w Swap) (taken []Taken, err error) {
	err = s.changing(ctx, func() error {
		begun := s.cfg.Now()
		var changes []handover
		defer func() { abandon(changes) }()
		if h := w.Policies[abi.RoleEvict]; h != nil {
			to := s.evictPolicy(h)
			defer to.Release()
			if changes, err = s.prepareEvict(ctx, &w, to); err != nil {
				return err
			}
		}
		if err := s.catalog.Lock(ctx); err != nil { // what is announced and planned below is all there is
			return err
		}
		defer s.catalog.Unlock()
		rest, err := s.catalog.PrepareSwap(ctx, w.From, &w.Policies, evictor.MaxHandoverState)
		if err != nil {
			rest.Abandon()
			return fmt.Errorf("store: %w", err)
		}
		all := changes
		changes = nil
		if taken, err = takeAll(all); err != nil {
			rest.Abandon()
			return err
		}
		taken = s.keep(taken, all, rest, begun)
		return nil
	})
	return taken, err
}

// changing makes a change while no other one is made.
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

// keep ends a change in which policies have taken over their roots.
func (s *Store) keep(taken []Taken, all []handover, rest *catalog.Swap, begun time.Time) []Taken {
	for _, t := range rest.Commit() {
		how := evictor.Replayed
		if t.Loaded {
			how = evictor.Loaded
		}
		taken = append(taken, Taken{Role: t.Role, From: t.From, Handover: how})
	}
	for _, c := range all {
		c.Keep()
	}
	for i := range taken {
		taken[i].Took = s.cfg.Now().Sub(begun)
	}
	return taken
}

// takeAll lets a policy decide in all its roots, or in none.
func takeAll(changes []handover) (taken []Taken, err error) {
	for i, c := range changes {
		t := Taken{Role: abi.RoleEvict, Root: c.r.Path, From: c.From().Module.Digest(), Handover: c.Method()}
		if t.Entries, err = c.Take(); err != nil {
			for _, before := range changes[:i] {
				before.Undo()
			}
			abandon(changes[i+1:])
			return nil, fmt.Errorf("store: root %s: policy %s: %w", c.r.Path, c.To().Label, err)
		}
		taken = append(taken, t)
	}
	return taken, nil
}

// prepareEvict gets a policy ready for its roots. Those that are ready are in the answer also when there is an error.
func (s *Store) prepareEvict(ctx context.Context, w *Swap, to *evictor.Policy) (changes []handover, err error) {
	for _, r := range s.roots {
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

// handover is one of an evict policy in one root.
type handover struct {
	*evictor.Handover
	r *root
}

func abandon(changes []handover) {
	for _, c := range changes {
		c.Abandon()
	}
}
