// Package swap replaces the policies of a store while it works, in all places or in none.
package swap

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/policy/shadow"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/evictor"
)

// Root is a root in which an evict policy acts.
type Root struct {
	Path    string
	Evictor *evictor.Evictor
	Policy  func() *evictor.Policy // the one that acts
	Reach   func() uint32          // how many slots it can have
}

// Store is where policies act. One swap at a time is made in it.
type Store struct {
	Roots   []Root
	Catalog *catalog.Catalog
	Shadows *shadow.Set
	Now     func() time.Time
	Evict   func(h *policy.Handle) *evictor.Policy // takes a reference to a policy that is about to evict
}

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

// Do replaces policies under load. Everything that can fail is done while the old ones still act. When something fails,
// or a new policy fails at the last moment in one of its roots, all is as before. Do waits for scans, until the context
// is done.
func (s *Store) Do(ctx context.Context, w Swap) (taken []Taken, err error) {
	begun := s.Now()
	var changes []Handover
	defer func() {
		for _, c := range changes {
			c.Abandon()
		}
	}()
	if h := w.Policies[abi.RoleEvict]; h != nil {
		b := s.Evict(h)
		defer b.Release()
		if changes, err = s.PrepareEvict(ctx, &w, b); err != nil {
			return nil, err
		}
	}
	if err := s.Catalog.Lock(ctx); err != nil { // what is announced and planned below is all there is
		return nil, err
	}
	defer s.Catalog.Unlock()
	rest, err := s.Catalog.PrepareSwap(ctx, w.From, &w.Policies, evictor.MaxHandoverState)
	if err != nil {
		rest.Abandon()
		return nil, fmt.Errorf("store: %w", err)
	}
	all := changes
	changes = nil
	if taken, err = TakeAll(all); err != nil {
		rest.Abandon()
		return nil, err
	}
	return s.keep(taken, all, rest, begun), nil
}

// keep ends a change in which policies have taken over their roots.
func (s *Store) keep(taken []Taken, all []Handover, rest *catalog.Swap, begun time.Time) []Taken {
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
		taken[i].Took = s.Now().Sub(begun)
	}
	return taken
}

// TakeAll lets a policy decide in all its roots, or in none.
func TakeAll(changes []Handover) (taken []Taken, err error) {
	for i, c := range changes {
		t := Taken{Role: abi.RoleEvict, Root: c.r.Path, From: c.From().Module.Digest(), Handover: c.Method()}
		if t.Entries, err = c.Take(); err != nil {
			for _, before := range changes[:i] {
				before.Undo()
			}
			for _, later := range changes[i+1:] {
				later.Abandon()
			}
			return nil, fmt.Errorf("store: root %s: policy %s: %w", c.r.Path, c.To().Label, err)
		}
		taken = append(taken, t)
	}
	return taken, nil
}

// PrepareEvict gets a policy ready for its roots. Those that are ready are in the answer also when there is an error.
func (s *Store) PrepareEvict(ctx context.Context, w *Swap, to *evictor.Policy) (changes []Handover, err error) {
	for _, r := range s.Roots {
		from := r.Policy()
		if w.Root != "" && w.Root != r.Path || w.From != "" && w.From != from.Label {
			continue
		}
		c, err := r.Evictor.Prepare(ctx, to, from)
		if err != nil {
			return changes, fmt.Errorf("store: root %s: policy %s: %w", r.Path, to.Label, err)
		}
		changes = append(changes, Handover{c, r})
	}
	if len(changes) == 0 {
		return nil, fmt.Errorf("%w: evict policy %s", catalog.ErrNoPolicy, cmp.Or(w.From, "of root "+w.Root))
	}
	return changes, nil
}

// Handover is one of an evict policy in one root.
type Handover struct {
	*evictor.Handover
	r Root
}
