package store

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// recovery is what a start finds in a root, and what an end keeps for the next start: scans and the checkpoint.
//
// A clean end writes a checkpoint: the index, with the evict policy's state. Otherwise a scan looks at every file and enters
// the pieces that it finds (beginScan, scan): the header of a file says which piece it is, and the walk how it is named.
// What becomes of a file that is not a sound piece, or of a piece that is there twice, the [scanJudge] of the root says. The
// order of storing stands for the order of last touch, which a crash loses.
//
// Where names and sizes can be listed a [listing] takes the place of the look at every file, and heads are read behind it.
//
// While a root is scanned, the store serves: lookups find what the scan has seen, and what was stored since. Until the scan
// has ended,
//
//   - the account has, on top of the entries seen, an upper bound of the bytes that the others take: all that is in use on
//     the file system. A put that does not fit is shed, and nothing is evicted, because the oldest entry is not known yet.
//   - a put first looks whether its file is there already, unseen (seek): then it is taken into the index, and the put fails
//     as resident.
//   - the evict policy gets no event. At the end it gets everything in order of last touch, what was touched since the scan
//     began last, a slice at a time.
type recovery struct {
	root  *root
	kept  *keptDir
	set   *entries.Set
	judge scanJudge
	from  lister // that scans list, or nil: they walk
	count scanCounters
	// The set's lock guards these.
	missed     map[string]int64 // by the last scan, as there
	overlooked *int64           // of a shared root: what is booked of files that it does not serve
	// incomplete is set when a scan could not read something.
	incomplete atomic.Bool

	current atomic.Pointer[scan] // the first scan while it is under way, or nil
}

// scanCounters count since the store was opened.
type scanCounters struct {
	Scanned   atomic.Uint64 // files that scans have seen
	Swept     atomic.Uint64 // temporaries removed
	Foreign   atomic.Uint64 // files that are not the store's
	Unclaimed atomic.Uint64 // sound pieces that are of no namespace that is known, or under a name that none can have
}

// seeks says whether a scan is under way that may yet come to the file of a piece.
func (r *recovery) seeks() bool { return r.current.Load() != nil && r.kept.Health.Serves() }

// seek enters the file of a piece that the scan under way has not come to, if it stands under one of these names.
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

// sweepTemps removes temporaries that an earlier run left among the store's own files.
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

func (r *recovery) sweep(name string) error {
	if err := r.kept.FS.Remove(name); err != nil {
		return err
	}
	r.count.Swept.Add(1)
	return nil
}

// scanReport is how often a scan is reported in the log.
const scanReport = 5 * time.Second

// report tells the log how far a scan has come, until end is called.
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

// recover finds what a root holds. Where a checkpoint tells, it is done with that. Otherwise a scan is due, and until
// it has ended, the root serves what it has seen.
func (r *root) recover(ctx context.Context) error {
	if err := r.Quarantine.Load(); err != nil {
		return err
	}
	return r.owner.recover(ctx)
}

// warnOfSpace says that the file system has less room than the root is to take, or does not tell what is to be left free.
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

// scanAll scans until it has seen everything. An error is sent to failed, if there is a receiver, and then the scan is
// tried again.
func (r *root) scanAll(ctx context.Context, failed chan<- error) {
	if r.Evictor.HoldHandovers(ctx) != nil { // no policy takes over during the scan
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
			_ = r.kept.loadNamespaces() // one may have been left out for the same reason
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
	return r.owner.scan(ctx)
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
	patience := time.After(s.cfg.ScanWait)
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
		case <-patience:
			s.log.Info("the store serves while its roots are scanned")
			return nil
		}
	}
}
