package store

import (
	"context"
	"time"

	"github.com/kvhost/kvhost/staging"
)

// recover finds what a root holds. Where a checkpoint tells, it is done with that. Otherwise a scan is due, and until
// it has ended, the root serves what it has seen.
func (r *root) recover(ctx context.Context) error {
	if err := r.Quarantine.Load(); err != nil {
		return err
	}
	return r.kind.recover(ctx)
}

// warnOfSpace says that the file system has less room than the root is to take.
func (r *root) warnOfSpace(room func(staging.Space) int64) {
	space, err := r.FS.Statfs(r.Path)
	if err != nil {
		return
	}
	if has := room(space); has < r.cfg.Capacity {
		r.Log.Warn("the file system has less room than the root's capacity; stores evict once it is full", "capacity",
			r.cfg.Capacity, "has", has, "fix", "lower the capacity, or free space")
	}
}

// scanAll scans until it has seen everything. What goes wrong is sent to failed, if somebody waits for that, and then
// tried again.
func (r *root) scanAll(ctx context.Context, failed chan<- error) {
	if r.Evictor.HoldHandovers(ctx) != nil { // nobody takes over meanwhile
		return
	}
	defer r.Evictor.AllowHandovers()
	for pause := time.Second; ; pause = min(2*pause, time.Minute) {
		err := r.scanOnce(ctx)
		if err == nil {
			close(r.scanned)
			return
		}
		select {
		case failed <- err:
		default:
			r.Log.Error("the scan failed and is begun again; what it has not seen are misses", "error", err, "pause", pause)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
	}
}

func (r *root) scanOnce(ctx context.Context) error {
	defer r.recovery.report(ctx)()
	return r.kind.scan(ctx)
}

// ScanDone is closed once every root's scan has ended. It stays open when the store is closed before that.
func (s *Store) ScanDone() <-chan struct{} { return s.scanDone }

// scanRoots starts the scans that are due, and waits for them as long as told. One that fails is begun again, and
// fails Open where there is no other root.
func (s *Store) scanRoots(ctx context.Context) error {
	failed := make(chan error)
	for _, r := range s.roots {
		switch {
		case r.unavailable.Load() || !r.Scanning():
		case r.cfg.Scheduler != nil:
			if err := r.scanOnce(ctx); err != nil {
				return err
			}
			close(r.scanned)
		default:
			s.work.Go(func() { r.scanAll(s.run, failed) })
		}
	}
	s.work.Go(func() {
		for _, r := range s.roots {
			select {
			case <-r.scanned:
			case <-s.run.Done():
				return
			}
		}
		countCopies(s)
		if s.catalog.Lock(s.run) == nil {
			s.catalog.ForgetUnregistered()
			s.catalog.Unlock()
		}
		close(s.scanDone)
	})
	if s.cfg.ScanWait < 0 {
		return nil
	}
	patience := time.NewTimer(s.cfg.ScanWait)
	defer patience.Stop()
	for {
		select {
		case <-s.scanDone:
			return nil
		case err := <-failed:
			if len(s.roots) == 1 {
				return err
			}
			s.log.Error("a scan failed and is begun again; what it has not seen are misses", "error", err)
		case <-ctx.Done():
			return ctx.Err()
		case <-patience.C:
			s.log.Info("the store serves while its roots are scanned")
			return nil
		}
	}
}
