package store

import (
	"context"
	"errors"
	"time"

	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// seeks reports whether a running scan may not have seen the file of a piece yet.
func (r *recovery) seeks() bool { return r.current.Load() != nil && r.kept.Health.Serves() }

// seek enters the file of a piece that the running scan has not seen, if the file has one of the given names.
func (r *recovery) seek(cl *catalog.Class, key *kv.Key, rank uint32, names ...string) {
	c, d := r.current.Load(), r.kept
	if c == nil || !d.Health.Serves() {
		return
	}
	for _, rel := range names {
		if rel == "" {
			continue
		}
		name := d.Slash + rel
		if d.Orphans.Has(name) {
			continue
		}
		if h, info, err := d.Look(name); err == nil && cl.IsPiece(&h, key, rank) {
			c.identify(name, rel, &h, pieceformat.Padded(info.Allocated))
			return
		}
	}
}

// sweepTemps removes temporaries of an earlier run from the store's own directories.
func (r *recovery) sweepTemps() {
	d := r.kept
	for _, dir := range [...]string{
		pieceformat.MetaDir, pieceformat.NamespacesDir, pieceformat.PlansDir,
		pieceformat.Copies(pieceformat.NamespacesDir)[1], pieceformat.Copies(pieceformat.PlansDir)[1],
	} {
		list, err := d.FS.ReadDir(d.Slash + dir)
		if err != nil {
			d.Log.Warn("a directory could not be read; temporaries in it are left", "directory", dir, "error", err)
		}
		for _, e := range list {
			if temp, ok := pieceformat.ParseTemp(e.Name()); ok && r.root.ownsTemp(temp.Host) {
				if err := r.sweep(d.Slash + dir + "/" + e.Name()); err != nil {
					d.Log.Warn("a temporary is left", "directory", dir, "file", e.Name(), "error", err)
				}
			}
		}
	}
}

// scanReport is the interval of log messages about a running scan.
const scanReport = 5 * time.Second

// report logs the progress of a scan until end is called.
func (r *recovery) report(ctx context.Context) (end func()) {
	ctx, stop := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(scanReport)
		defer tick.Stop()
		for start := r.root.store.cfg.Now(); ; {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
				r.set.Lock()
				entries := r.set.Index.Len()
				r.set.Unlock()
				r.kept.Log.Info("the scan goes on", "files", r.count.Scanned.Load(), "entries", entries,
					"for", r.root.store.cfg.Now().Sub(start).Round(time.Second))
			}
		}
	}()
	return func() {
		stop()
		<-ended
	}
}

// recover restores the entries of the root. If there is no valid checkpoint, a scan becomes due, and the root serves the
// entries that it has seen.
func (r *root) recover(ctx context.Context) error {
	if err := r.Quarantine.Load(); err != nil {
		return err
	}
	return r.owner.recover(ctx)
}

// warnOfSpace logs a warning if the file system has less room than the capacity, or if it does not report the size that
// min_free needs.
func (r *root) warnOfSpace(room func(staging.Space) int64) {
	space, err := r.FS.Statfs(r.Path)
	if errors.Is(err, staging.ErrNoSize) && r.Account.Floor() {
		r.Log.Warn("min_free has no effect, as the file system states no size: the capacity alone bounds the root")
	}
	if err != nil {
		return
	}
	if has := room(space); has < r.cfg.Capacity {
		r.Log.Warn("the file system has less room than the root's capacity; stores evict once it is full", "capacity",
			r.cfg.Capacity, "has", has, "fix", "lower the capacity, or free space")
	}
}

// scanAll repeats the scan until it has seen everything. It sends an error to failed if there is a receiver.
func (r *root) scanAll(ctx context.Context, failed chan<- error) {
	if r.Evictor.HoldHandovers(ctx) != nil { // no policy may take over during the scan
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
			_ = r.kept.loadNamespaces() // a temporary error may also have left out a namespace
			r.Log.Error("the scan failed and is begun again; chunks that it has not seen are misses", "error", err, "pause", pause)
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
	return r.owner.scan(ctx)
}

// ScanDone returns a channel that is closed when the scans of all roots have ended. It stays open if the store is closed
// before.
func (s *Store) ScanDone() <-chan struct{} { return s.scanDone }

// scanRoots starts the scans that are due and waits for them for at most ScanWait. A scan that fails is repeated. If there is
// only one root, the failure is returned instead.
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
	patience := time.After(s.cfg.ScanWait)
	for {
		select {
		case <-s.scanDone:
			return nil
		case err := <-failed:
			if len(s.roots) == 1 {
				return err
			}
			s.log.Error("a scan failed and is begun again; chunks that it has not seen are misses", "error", err)
		case <-ctx.Done():
			return ctx.Err()
		case <-patience:
			s.log.Info("the store serves while its roots are scanned")
			return nil
		}
	}
}

// scan examines all files once, after beginScan.
func (r *recovery) scan(ctx context.Context) error {
	start, c := r.root.store.cfg.Now(), r.current.Load()
	err := c.walk(ctx)
	if err == nil && !r.kept.Health.Serves() {
		err = r.kept.Health.OutError() // an incomplete scan does not account for all files
	}
	if err != nil {
		r.current.Store(r.newScan(false)) // for the next attempt
		return err
	}
	r.current.Store(nil)
	c.settle(c.Close())
	c.order()
	r.miss(c)
	c.End(ctx, func(int64) {})
	r.makeRoom()
	if files := r.count.Scanned.Load(); files > 0 { // usually after a kill
		r.kept.Log.Info("scanned", "files", files, "took", r.root.store.cfg.Now().Sub(start))
	}
	return nil
}

// walk examines every file.
func (c *scan) walk(ctx context.Context) error {
	d := c.by.kept
	if c.by.from != nil {
		return c.list(ctx, c.by.from)
	}
	return errors.Join(d.Walk(ctx, "", c.by.root.store.cfg.ScanWorkers, c.file, c.skipped), c.short)
}
