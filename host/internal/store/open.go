package store

import (
	"context"
	"errors"
	"runtime"

	"golang.org/x/sync/semaphore"

	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/moves"
	"github.com/kvhost/kvhost/staging"
)

// Open locks the roots, restores their entries, and starts the background work. If it fails, no lock stays held. With
// [Config.Dry] it fails in the same cases and leaves no trace in the roots. The store can then be used only for [Store.Stats].
func Open(ctx context.Context, cfg Config) (*Store, error) {
	s, err := prepare(ctx, cfg)
	if err != nil {
		return nil, err
	}
	if err := s.openRoots(ctx); err != nil {
		return nil, errors.Join(err, s.abandon())
	}
	for _, h := range s.cfg.Policies.Shadows {
		if err := s.addShadow(ctx, h); err != nil {
			return nil, errors.Join(err, s.Close())
		}
	}
	if cfg.Dry {
		return s, nil
	}
	s.tellRoots()
	if cfg.Stepped {
		return s, nil
	}
	s.work.Go(func() { s.catalog.Run(s.run) })
	if s.mover != nil {
		s.work.Go(func() { s.mover.Run(s.run) })
	}
	for _, r := range s.roots {
		s.work.Go(func() { r.upkeep(s.run) })
		if r.leaving.To != nil {
			s.work.Go(func() { r.leaving.Run(s.run) })
		}
	}
	return s, nil
}

// prepare creates a store with its policies, without any file of its roots.
func prepare(ctx context.Context, cfg Config) (*Store, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	s := &Store{
		cfg: cfg, log: cfg.Log, changes: entries.NewChangeLog(keptChanges),
		requests: &touchRecord{seen: map[uint32]*touches{}}, discarding: staging.NewTurns(max(1, runtime.GOMAXPROCS(0)/2)),
	}
	s.live.Store(&s.cfg)
	if len(cfg.Roots) > 1 {
		s.copies = entries.NewCopies()
	}
	s.hierarchy = hierarchyOf(s)
	s.seq.Init(cfg.Now, cfg.HostID)
	for i := range s.stripes {
		s.stripes[i] = semaphore.NewWeighted(1)
	}
	s.swapping, s.scanDone = semaphore.NewWeighted(1), make(chan struct{})
	s.candidates.New = func() any { return new(candidate) }
	if err := s.openCatalog(ctx); err != nil {
		return nil, err
	}
	if len(s.levels) > 1 {
		var err error
		if s.mover, err = moves.New(cfg.Moves.of(s)); err != nil {
			return nil, errors.Join(err, s.catalog.Close())
		}
	}
	s.run, s.stop = context.WithCancel(context.Background())
	for _, cfg := range s.cfg.Roots {
		r, err := openRoot(ctx, s, cfg)
		if err != nil {
			return nil, errors.Join(err, s.abandon())
		}
		s.roots = append(s.roots, r)
		r.level.roots = append(r.level.roots, r)
	}
	return s, nil
}

// abandon releases the resources that [prepare] has created.
func (s *Store) abandon() error {
	s.stop()
	s.work.Wait()
	s.shadows.Close()
	return errors.Join(s.closeRoots(), s.catalog.Close())
}

func (s *Store) openRoots(ctx context.Context) error {
	if err := s.eachRoot(ctx, func(r *root) error { return r.take(ctx) }); err != nil || s.cfg.Dry {
		return err
	}
	if err := s.eachRoot(ctx, func(r *root) error { return r.kept.loadNamespaces() }); err != nil {
		return err
	}
	if err := s.eachRoot(ctx, func(r *root) error { return r.recover(ctx) }); err != nil {
		return err
	}
	return s.scanRoots(ctx)
}

// Close ends the background work and releases the roots. The caller must have ended its puts and leases: later calls on them
// fail, and the next start removes their temporaries.
func (s *Store) Close() error {
	if s.closed.Swap(true) {
		return nil
	}
	if s.cfg.Dry {
		return s.abandon()
	}
	s.drain(s.live.Load().Moves.Shutdown)
	s.stop()
	s.work.Wait()
	_ = s.swapping.Acquire(context.Background(), 1) // the context never ends
	s.shadows.Close()
	s.swapping.Release(1)
	for _, r := range s.roots {
		if r.unavailable.Load() {
			continue // the entries of this root are not known
		}
		if r.Health.Takes() {
			if err := r.budget.SaveExact(); err != nil {
				s.log.Warn("write budget not saved: after a crash the count is too high", "root", r.Path, "error", err)
			}
		}
		r.Lock()
		r.Moves.KeepAll()
		r.Unlock()
		if !r.cfg.Shared && r.cfg.Lender == nil {
			r.recovery.saveCheckpoint()
		}
	}
	return errors.Join(s.closeRoots(), s.catalog.Close())
}

func (s *Store) closeRoots() (err error) {
	if s.mover != nil {
		err = s.mover.Close()
	}
	for _, r := range s.roots {
		err = errors.Join(err, r.close())
	}
	return err
}

// openCatalog opens the policies that are bound to namespaces.
func (s *Store) openCatalog(ctx context.Context) (err error) {
	p := &s.cfg.Policies
	s.catalog, err = catalog.New(ctx, catalog.Options{
		Log: s.log, Now: s.cfg.Now, Seed: s.cfg.Seed, Capacity: uint64(s.cfg.Capacity()), Expiry: s.cfg.ttl, Roots: keptFiles{s},
		Compression: s.cfg.Compression, AdmitFault: s.admissionFault,
		Policies: catalog.Policies{Admit: p.Admit, Place: p.Place, Layout: p.Layout, Rules: p.Rules},
	})
	return err
}

// keptFiles writes the catalog's files to all roots. It implements [catalog.Roots].
type keptFiles struct{ *Store }

// Keep implements [catalog.Roots]. A root that stops taking stores during the call catches up before it takes stores again.
func (k keptFiles) Keep(dir, base string, data []byte) error {
	if k.closed.Load() {
		return ErrClosed
	}
	for _, r := range k.roots {
		if !r.Health.Takes() {
			continue
		}
		if err := r.kept.Keep(dir, base, data); err != nil && r.Health.Takes() {
			return err
		}
	}
	return nil
}

// Forget implements [catalog.Roots]. It skips roots in which a scan could not read all files, since these may need the file.
func (k keptFiles) Forget(dir, base string) {
	for _, r := range k.roots {
		if !r.recovery.incomplete.Load() && r.Health.Takes() {
			r.forget(dir, base)
		}
	}
}
