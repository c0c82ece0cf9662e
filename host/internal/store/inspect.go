package store

import (
	"context"
	"errors"
	"fmt"

	"github.com/kvhost/kvhost/host/internal/store/health"
)

// Inspection is what a store knows about one of its roots.
type Inspection struct {
	Dir     string
	Used    int64 // bytes in the root's account
	Missing int64 // of those, bytes reserved for pieces that are not there
	InUse   int   // entries that are pinned, being written or being removed
}

// Inspect is for tests. It calls visit, unless that is nil, with what it finds in each root; until visit returns no
// root reserves or frees anything, so that visit can compare the account with the disk. The error says where the index
// of a root contradicts itself or the root's account: between operations it never does, within one it may. Inspect
// looks at every entry and holds up every caller of the store.
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
		if c, ok := r.owner.(*joint); ok {
			c.step(ctx)
		}
	}
	return nil
}
