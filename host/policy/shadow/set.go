package shadow

import (
	"context"
	"slices"
	"sync/atomic"
	"time"

	"github.com/kvhost/kvhost/host/policy"
)

// Running is a shadow with its policy.
type Running struct {
	*Shadow
	*policy.Handle
	Since time.Time
}

// Set is the shadows of one cache, by the names of their policies, with the stream of requests that they receive. Its
// list is changed by one caller at a time.
type Set struct {
	Stream
	running atomic.Pointer[[]*Running] // replaced, never changed
}

// List returns the running shadows. The caller must not change it.
func (s *Set) List() []*Running {
	if list := s.running.Load(); list != nil {
		return *list
	}
	return nil
}

// Has says whether a shadow has this name.
func (s *Set) Has(name string) bool { return s.index(name) >= 0 }

func (s *Set) index(name string) int {
	return slices.IndexFunc(s.List(), func(r *Running) bool { return r.Label == name })
}

// Start starts a shadow, in place of the one that has its name if there is one. It takes over the caller's reference to
// the policy. When that fails the old shadow keeps running.
func (s *Set) Start(ctx context.Context, h *policy.Handle, since time.Time, o policy.EvictOptions) error {
	started, err := Start(ctx, h.Module, o)
	if err != nil {
		h.Release()
		return err
	}
	next, list := &Running{started, h, since}, slices.Clone(s.List())
	i := s.index(h.Label)
	if i < 0 {
		list = append(list, next)
	} else {
		next, list[i] = list[i], next
	}
	s.running.Store(&list)
	s.Add(started)
	if i >= 0 {
		s.end(next) // the old one
	}
	return nil
}

// End ends a shadow. It is false when there is none of that name.
func (s *Set) End(name string) bool {
	i := s.index(name)
	if i < 0 {
		return false
	}
	list := slices.Clone(s.List())
	removed := list[i]
	list = slices.Delete(list, i, i+1)
	s.running.Store(&list)
	s.end(removed)
	return true
}

func (s *Set) end(r *Running) {
	s.Remove(r.Shadow)
	r.Close()
	r.Release()
}

// Close ends all shadows.
func (s *Set) Close() {
	for _, r := range s.List() {
		s.end(r)
	}
	s.running.Store(nil)
}
