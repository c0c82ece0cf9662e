package store

import (
	"context"
	"errors"
	"fmt"

	"github.com/kvhost/kvhost/host/internal/store/health"
)

// Inspection is the state of one root as the store knows it.
type Inspection struct {
	Dir     string
	Used    int64 // bytes in the account
	Missing int64 // the part of Used that is reserved for missing pieces
	InUse   int   // entries that are pinned, being written or being removed
}

// Inspect is for tests. It calls visit with the state of each root, unless visit is nil. Until visit returns, no root reserves
// or frees anything, so that visit can compare the account with the disk. The error describes an inconsistency of a root's
// index, in itself or with the root's account. There must be none between operations, but there may be one during an operation.
// Inspect examines every entry and blocks all callers of the store.
func (s *Store) Inspect(visit func([]Inspection)) error {
	var err error
	list := make([]Inspection, len(s.roots))
	for i, r := range s.roots {
		r.Lock()
		defer r.Unlock()
		kept, release := r.Quarantine.Hold()
		defer release()
		if rerr := r.Check(kept); rerr != nil {
			err = errors.Join(err, fmt.Errorf("store: root %s contradicts itself: %w", r.Path, rerr))
		}
		list[i] = Inspection{Dir: r.Path, Used: r.Account.Figures().Used}
		list[i].Missing, list[i].InUse = r.Census()
	}
	if visit != nil {
		visit(list)
	}
	return err
}

// Task is a part of a store's background work.
type Task uint8

const (
	// RetryRemovals removes files that could not be removed before.
	RetryRemovals Task = iota
	// Probe checks a root. A root that is out of service or takes no stores is returned to service if possible.
	Probe
	// Step makes one step of a shared root with a [Scheduler].
	Step
)

// Maintain runs a part of a root's background work at once. root is an index of [Config.Roots]. It is for tests: they set the
// periods of background work to hours, so that a run can be repeated.
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
		if c, ok := r.owner.(*joint); ok {
			c.step(ctx)
		}
	}
	return nil
}
