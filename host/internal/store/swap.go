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
	Took     time.Duration
}

// Swap replaces policies under load. Everything that can fail is done while the old ones still act: when something fails
// in one of the roots, all is as before. It waits for scans, until the context is done.
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

// replace lets policies take over: those of roots, which are prepared, and those of namespaces, which bind prepares. All of
// them do, or none.
func (s *Store) replace(
	ctx context.Context, begun time.Time, changes []handover, bind func() (*catalog.Swap, error),
) (taken []Taken, err error) {
	if err := s.catalog.Lock(ctx); err != nil { // what is announced and planned below is all there is
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
			err = fmt.Errorf("store: root %s: policy %s: %w", c.r.Path, c.To().Label, unready)
		}
	}
	if err != nil {
		rest.Abandon()
		abandon(changes)
		return nil, err
	}
	for _, c := range changes {
		taken = append(taken, Taken{
			Role: abi.RoleEvict, Root: c.r.Path, From: c.From().Module.Digest(), Handover: c.Method(), Entries: c.Finish(),
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
