package store

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/host/internal/codec"
	"github.com/kvhost/kvhost/host/internal/store/capacity"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/evictor"
	"github.com/kvhost/kvhost/host/internal/store/files"
	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/store/moves"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
)

// own sets the owner of the root and the judge of its scans.
func (r *root) own() {
	r.recovery = &recovery{root: r, kept: r.kept, set: &r.Set}
	if r.cfg.Shared {
		c := newJoint(r)
		r.owner, r.recovery.judge = c, judge{c}
	} else {
		r.owner, r.recovery.judge = newSole(r), soleJudge{}
	}
	r.directory = health.NewDirectory(r.Health, r.Path, r.Slash+r.file(pieceformat.LockFile), pieceformat.RootDirs[:], !r.cfg.Shared)
}

// openRoot creates a root with its evict policy. It does not access the directory.
func openRoot(ctx context.Context, s *Store, cfg RootConfig) (*root, error) {
	log := s.log.With("root", cfg.Path)
	r := &root{
		store: s, cfg: cfg, upkeepWake: make(chan struct{}, 1), level: s.at(cfg.Level), scanned: make(chan struct{}), some: make(chan struct{}),
	}
	changes, copies := s.changes, s.copies
	if cfg.Lender != nil { // borrowed entries are not part of this host's changes
		changes, copies = entries.NewChangeLog(0), entries.NewCopies()
	}
	r.Init(entries.Config{
		MaxEntries: cfg.MaxEntries, Catalog: s.catalog, Changes: changes, Copies: copies, Volatile: cfg.Volatile, Now: s.cfg.Now, Clock: s.seq.Clock,
		Account: capacity.New(capacity.Config{
			Dir: cfg.Path, Bounds: cfg.bounds(), Now: s.cfg.Now,
		}),
	})
	r.Dir = files.New(files.Config{
		Path: cfg.Path, Log: log, Account: r.Account, Sequence: &s.seq,
		Health: health.NewMonitor(health.Config{
			Dir: cfg.Path, FS: cfg.FS, Limit: s.cfg.IOTimeout, Every: s.cfg.UpkeepEvery, Now: s.cfg.Now, Log: log,
			Remote: cfg.Remote || cfg.Lender != nil,
			Ended:  func() { wake(r.upkeepWake) },
		}),
		Strict: s.cfg.Strict, Readers: !cfg.NoDirectory, QuarantineFiles: s.cfg.QuarantineFiles, QuarantineBytes: cfg.Capacity / quarantineShare,
	})
	r.origin = moves.Origin{Set: &r.Set, Level: cfg.Level, Copies: copies, Clock: s.seq.Clock, Open: r.openMoved}
	if len(s.levels) > 1 {
		r.Hits.Start()
	}
	r.meter.Now = s.cfg.Now
	if cfg.Compressed && s.cfg.Compression.Any(codec.Faster) {
		r.meter.gain = s.catalog.Compression.Root(&r.meter.Meter, cfg.Volatile, cfg.Speeds, log)
	}
	p := s.evictPolicy(s.cfg.evicts(&cfg))
	defer p.Release() // the evictor has its own reference
	if err := r.StartEvictor(ctx, evictor.Config{
		Policy: p, Run: s.run, Work: &s.work, Size: evictor.Size{Capacity: cfg.Capacity}, Seed: s.cfg.Seed, Log: r.Log,
	}); err != nil {
		r.Health.Close()
		return nil, fmt.Errorf("store: root %s: policy %s: %w", r.Path, p.Label, err)
	}
	r.kept = &keptDir{Dir: r.Dir, Catalog: s.catalog, Sequence: &s.seq}
	r.own()
	r.budget = r.newBudget()
	return r, nil
}

// take creates the directories and takes the locks. It does not examine pieces. In a dry store it only checks whether this is
// possible, and keeps no lock.
func (r *root) take(ctx context.Context) (err error) {
	dry := r.store.cfg.Dry
	if dry && r.cfg.NoDirectory {
		return nil
	}
	missing, err := health.MissingRoot(r.FS, r.Path, r.cfg.RequireMount)
	if err == nil && missing {
		if making := r.store.cfg.Making; making != nil && !dry && !r.cfg.NoDirectory && !r.unavailable.Load() { // a running host has announced its addresses already
			if err := making(); err != nil {
				return err
			}
		}
		err = health.MakeRoot(r.FS, r.Path, dry)
	}
	if err == nil {
		err = r.apart()
	}
	if err == nil && dry && !missing {
		if err = unix.Access(r.Path, unix.W_OK|unix.X_OK); err == nil {
			return r.tryLocks(ctx)
		}
		err = &fs.PathError{Op: "write to", Path: r.Path, Err: err}
	}
	if err != nil {
		return fmt.Errorf("store: root %s: %w", r.Path, err)
	} else if dry {
		return nil
	}
	// The contents of the root are only as durable as its own name.
	if err := r.FS.SyncDir(filepath.Dir(r.Path)); err != nil && !errors.Is(err, fs.ErrPermission) {
		return fmt.Errorf("store: root %s: %w: %w", r.Path, ErrSync, err)
	}
	if err := r.lockRoot(ctx); err != nil {
		return err
	}
	for _, file := range pieceformat.RootFiles {
		if err := health.Clear(r.FS, r.Slash+r.file(file), false, r.Log); err != nil {
			return fmt.Errorf("store: root %s: %w", r.Path, err)
		}
	}
	r.recovery.sweepTemps()
	if err := r.budget.Load(); err != nil {
		return fmt.Errorf("store: root %s: %w", r.Path, err)
	}
	return nil
}

func (r *root) lockRoot(ctx context.Context) error {
	if err := r.directory.Lock(); err != nil {
		return r.notLocked(err)
	}
	if err := r.owner.lock(ctx); err != nil {
		return errors.Join(err, r.directory.Close())
	}
	return nil
}

// tryLocks returns the error that lockRoot would return now. It creates no lock file.
func (r *root) tryLocks(ctx context.Context) (err error) {
	var locks []io.Closer
	lock := r.Slash + r.file(pieceformat.LockFile)
	if _, err := r.FS.Stat(lock); err == nil {
		if locks, err = health.Lock(r.FS, r.Path, lock, !r.cfg.Shared, nil); err != nil {
			return r.notLocked(err)
		}
	}
	if _, serr := r.FS.Stat(r.Slash + pieceformat.LockFile); serr == nil {
		err = r.owner.lock(ctx)
		r.owner.leave()
	}
	return errors.Join(err, health.Unlock(locks))
}

// notLocked returns the error for a lock that could not be taken.
func (r *root) notLocked(err error) error {
	if errors.Is(err, staging.ErrLocked) && r.cfg.Shared {
		return fmt.Errorf("%w: %s: %w; a host with the same store.host_id, %s, has joined: stop it, or give each host a host_id (the default is the "+
			"machine's, so hosts of one machine need one)", ErrRootBusy, r.Path, err, r.store.cfg.HostID)
	} else if errors.Is(err, staging.ErrLocked) {
		return fmt.Errorf("%w: %s: %w; stop the other host, give this one a root of its own, or set shared = true on both",
			ErrRootBusy, r.Path, err)
	}
	return fmt.Errorf("store: root %s: %w", r.Path, err)
}

func (r *root) close() error {
	r.owner.leave()
	r.Lock()
	defer r.Unlock()
	err := errors.Join(r.Evictor.Close(), r.directory.Close())
	r.Health.Close()
	return err
}
