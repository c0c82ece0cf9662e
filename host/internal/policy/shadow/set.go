package shadow

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/kvhost/kvhost/host/internal/policy"
)

// Running is a shadow with its policy.
type Running struct {
	*Shadow
	*policy.Handle
	Since    time.Time
	capacity uint64
}

// Wish is a shadow to run. The handle is borrowed.
type Wish struct {
	Policy  *policy.Handle
	Options policy.EvictOptions
}

// Change is a change of all shadows, ready to be committed.
type Change struct {
	set     *Set
	next    []*Running
	started []*Running
}

// Prepare starts the wished shadows that do not run yet. Commit or Abandon must follow, also after an error.
func (s *Set) Prepare(ctx context.Context, list []Wish, since time.Time) (*Change, error) {
	c := &Change{set: s}
	for _, w := range list {
		i := s.index(w.Policy.Label)
		if i >= 0 && s.List()[i].Handle == w.Policy && s.List()[i].capacity == w.Options.Capacity {
			c.next = append(c.next, s.List()[i])
			continue
		}
		started, err := Start(ctx, w.Policy.Module, w.Options)
		if err != nil {
			return c, fmt.Errorf("shadow %s: %w", w.Policy.Label, err)
		}
		r := &Running{started, w.Policy.Acquire(), since, w.Options.Capacity}
		c.next, c.started = append(c.next, r), append(c.started, r)
	}
	return c, nil
}

// Commit lets the started shadows receive requests, and ends those that are not wished any more.
func (c *Change) Commit() { c.set.set(c.next) }

// Abandon ends the started shadows.
func (c *Change) Abandon() {
	for _, r := range c.started {
		r.Close()
		r.Release()
	}
}

// Set is the shadows of one cache, by the names of their policies. Its list is changed by one caller at a time. The
// zero Set has no shadow: its only cost is that of [Set.On].
type Set struct {
	running atomic.Pointer[[]*Running] // replaced, never changed
}

// List returns the running shadows. The caller must not change it.
func (s *Set) List() []*Running {
	if list := s.running.Load(); list != nil {
		return *list
	}
	return nil
}

// Has reports whether a shadow has this name.
func (s *Set) Has(name string) bool { return s.index(name) >= 0 }

func (s *Set) index(name string) int {
	return slices.IndexFunc(s.List(), func(r *Running) bool { return r.Label == name })
}

// Start starts a shadow, and replaces a shadow of the same name. It takes over the caller's reference to the policy. If
// it fails, the old shadow keeps running.
func (s *Set) Start(ctx context.Context, h *policy.Handle, since time.Time, o policy.EvictOptions) error {
	started, err := Start(ctx, h.Module, o)
	if err != nil {
		h.Release()
		return err
	}
	next := slices.DeleteFunc(slices.Clone(s.List()), func(r *Running) bool { return r.Label == h.Label })
	s.set(append(next, &Running{started, h, since, o.Capacity}))
	return nil
}

// End ends a shadow. It returns false if there is none of that name.
func (s *Set) End(name string) bool {
	found := s.Has(name)
	if found {
		s.set(slices.DeleteFunc(slices.Clone(s.List()), func(r *Running) bool { return r.Label == name }))
	}
	return found
}

// set replaces the list, and ends the shadows that are not in the new one.
func (s *Set) set(next []*Running) {
	before := s.List()
	s.running.Store(&next)
	for _, r := range before {
		if !slices.Contains(next, r) {
			r.Close()
			r.Release()
		}
	}
}

// Close ends all shadows.
func (s *Set) Close() { s.set(nil) }
