package store

import (
	"context"

	"github.com/kvhost/kvhost/host/internal/store/health"
)

// Task is a part of a store's own work.
type Task uint8

const (
	// RetryRemovals removes files that could not be removed before.
	RetryRemovals Task = iota
	// Probe looks at a root. One that is out of service, or takes no stores, is put back when it can be.
	Probe
	// Step is one step of a shared root that has a [Scheduler].
	Step
)

// Maintain does a part of a root's own work at once; the root is named by its place in [Config.Roots]. A store does all
// of it by itself: this is for tests, which set the periods of that work to hours so that a run repeats.
func (s *Store) Maintain(ctx context.Context, root int, task Task) error {
	if s.closed.Load() {
		return ErrClosed
	}
	r := s.roots[root]
	switch task {
	case RetryRemovals:
		r.Orphans.Retry(ctx)
	case Probe:
		if state := r.Health.State(); state > health.Full {
			return r.Health.Reopen(ctx, returning{r})
		}
		r.checkHealth(ctx)
	case Step:
		r.kind.step(ctx)
	}
	return nil
}
