package store

import (
	"context"
	"errors"
	"fmt"

	"github.com/kvhost/kvhost/staging"
)

// A root belongs to one host, which holds the lock file and the directory for as long as it runs, or to several. Each of those holds a
// lock file with its name, against a second host of that name, and the common one only while it joins: from then on its
// directory among the hosts' says that it is there, on other machines too, where a lock may not reach.

// lockRoot takes the root's lock.
func (r *root) lockRoot(ctx context.Context) error {
	err := r.directory.Lock()
	switch {
	case errors.Is(err, staging.ErrLocked):
		return fmt.Errorf("%w: %s: %w; stop the other host, give this one a root of its own, or set shared = true on both",
			ErrRootBusy, r.Path, err)
	case err != nil:
		return fmt.Errorf("store: root %s: %w", r.Path, err)
	}
	if err = r.kind.lockOut(ctx); err != nil {
		return errors.Join(err, r.directory.Close())
	}
	return nil
}
