package store

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strings"
	"time"

	"github.com/kvhost/kvhost/host/store/pieceformat"
	"github.com/kvhost/kvhost/host/store/shared"
	"github.com/kvhost/kvhost/staging"
)

// A root is one host's, which holds the lock file for as long as it runs, or several hosts'. Each of those holds a lock file of
// its own, against a second host of its name, and the first one only while it joins: from then on its directory among the
// hosts' says that it is there, on other machines too, where a lock may not reach.

// joinTimeout is how long a host waits for others that are joining.
const joinTimeout = 5 * time.Second

// lockRoot takes the root's lock.
func (r *root) lockRoot(ctx context.Context) (io.Closer, error) {
	lock, err := r.fs.Lock(r.lockName())
	switch {
	case errors.Is(err, staging.ErrLocked):
		return nil, fmt.Errorf("%w: %s: %w; stop the other host, give this one a root of its own, or set shared = true on both",
			ErrRootBusy, r.dir, err)
	case err != nil:
		return nil, fmt.Errorf("store: root %s: %w", r.dir, err)
	}
	if r.cfg.Shared {
		err = r.lockForJoin(ctx)
	} else {
		err = r.unshared()
	}
	if err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	return lock, nil
}

func (r *root) lockName() string {
	if r.cfg.Shared {
		return r.dir + "/" + pieceformat.LockFile + "." + r.store.cfg.HostID
	}
	return r.dir + "/" + pieceformat.LockFile
}

// unshared says who shares a root that this host wants for itself.
func (r *root) unshared() error {
	entries, err := r.fs.ReadDir(r.dir + "/" + shared.Dir + "/hosts")
	if errors.Is(err, fs.ErrNotExist) || err == nil && len(entries) == 0 {
		return nil
	} else if err != nil {
		return fmt.Errorf("store: root %s: %w", r.dir, err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return fmt.Errorf("%w: %s is shared by %s: stop them, or set shared = true here too; remove what is in %s/hosts of hosts that were killed",
		ErrRootBusy, r.dir, strings.Join(names, ", "), r.dir+"/"+shared.Dir)
}

// lockForJoin takes the lock that a host on its own would have, until this one has joined.
func (r *root) lockForJoin(ctx context.Context) (err error) {
	for begun := r.store.cfg.Now(); ; {
		r.gate, err = r.fs.Lock(r.dir + "/" + pieceformat.LockFile)
		if !errors.Is(err, staging.ErrLocked) {
			break
		}
		if r.store.cfg.Now().Sub(begun) > joinTimeout {
			return fmt.Errorf("%w: %s: %w; a host has it for itself: stop it, or set shared = true there too", ErrRootBusy, r.dir, err)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %s: %w", ErrRootBusy, r.dir, ctx.Err())
		case <-time.After(joinTimeout / 100):
		}
	}
	if err != nil {
		return fmt.Errorf("store: root %s: %w", r.dir, err)
	}
	return nil
}

func (r *root) openGate() {
	if r.gate != nil {
		_ = r.gate.Close() // the lock goes with the descriptor
		r.gate = nil
	}
}
