package store

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy/shadow"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/files"
	"github.com/kvhost/kvhost/host/internal/store/moves"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
	"golang.org/x/sync/semaphore"
)

// Store holds the chunks of one host. It is safe for concurrent use.
type Store struct {
	cfg      Config
	live     atomic.Pointer[Config] // cfg with the changes of Reload
	log      *slog.Logger
	catalog  *catalog.Catalog
	changes  *entries.ChangeLog
	requests *touchRecord
	seq      files.Sequence
	count    storeCounters

	hierarchy
	copying
	deciding
	ownWork

	stripes    [1024]*semaphore.Weighted // by fingerprint of the key; serializes the puts of a key over all roots
	discarding *staging.Turns            // limits discards to half of the processors, since they are not urgent
}

// copying is the state of copies between levels.
type copying struct {
	copies *entries.Copies // nil if there is one root
	mover  *moves.Mover    // nil if there is one level
	loads  moves.Loads     // running loads, which copies wait for
}

// deciding is the state of policy calls and policy changes.
type deciding struct {
	swapping   *semaphore.Weighted // held while policies change
	shadows    shadow.Set
	candidates sync.Pool    // pool of *candidate
	factsAt    atomic.Int64 // time of the last facts for the place policy
	admitFault sync.Once
}

// ownWork is the background work of the store.
type ownWork struct {
	run      context.Context // done when the store closes
	stop     context.CancelFunc
	work     sync.WaitGroup
	scanDone chan struct{}
	closed   atomic.Bool
}

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

// ScratchName returns the path of a file that a test may create in a root, given the root's path. It is a temporary of this
// host, so it is removed when a host opens the root after a kill. Its bytes do not count against the root's capacity.
func (s *Store) ScratchName(root, what string) string {
	return s.seq.TempName(root + "/" + pieceformat.MetaDir + "/" + what)
}

// tellRoots gives the place policy new facts.
func (s *Store) tellRoots() {
	facts := make([]abi.RootFacts, len(s.ours()))
	for i, r := range s.ours() {
		facts[i] = r.facts(i)
	}
	s.catalog.SetRoots(facts)
}

// factsEvery is the maximum age of the place policy's facts in nanoseconds.
const factsEvery = int64(time.Second)

// refreshFacts gives the place policy new facts if its facts are too old.
func refreshFacts(s *Store) {
	if now, last := int64(s.seq.Clock()), s.factsAt.Load(); len(s.roots) > 1 && now-last >= factsEvery &&
		s.factsAt.CompareAndSwap(last, now) {
		s.tellRoots()
	}
}

// EndRequest tells the evict policies that a request has ended, with the hints of its engine.
func (s *Store) EndRequest(request uint32, hints abi.Hints) {
	if s.closed.Load() || request == 0 {
		return
	}
	s.requests.End(request)
	now := s.seq.Clock()
	s.shadows.Tell(shadow.Step{Op: shadow.End, Request: request, Tenant: abi.None, Time: now, Hints: hints})
	for _, r := range s.roots {
		r.Evictor.EndRequest(request, hints, now)
	}
}

// admissionFault logs the first failure of the admit policy. After a failure everything is admitted.
func (s *Store) admissionFault(err error) {
	s.admitFault.Do(func() { s.log.Error("admit policy failed; everything is admitted", "error", err) })
}

// keptChanges is the maximum number of changes that a reader may be behind. They take about 8 MB once there is a reader.
const keptChanges = 1 << 16

// Changes returns the log of entries that become resident and of those that leave. Entries of a root that is out of service
// count as resident. An entry with copies in several roots is recorded once. It may be recorded twice if it is stored while a
// root with a copy is out of service, or if its root is shared.
func (s *Store) Changes() *entries.ChangeLog { return s.changes }

// Snapshot calls yield with the resident entries, as changes without a number, until yield returns false. Changes during the
// call may be missing. They are in the log: call [entries.ChangeLog.Start] before the snapshot.
func (s *Store) Snapshot(yield func([]entries.Change) bool) { snapshot(s.ours(), yield) }

func snapshot(roots []*root, yield func([]entries.Change) bool) bool {
	batch := make([]entries.Change, 0, entries.SnapshotStep)
	for _, r := range roots {
		for from, more := uint32(0), true; more; from += entries.SnapshotStep {
			if batch, more = r.Snapshot(from, batch[:0]); len(batch) > 0 && !yield(batch) {
				return false
			}
		}
	}
	return true
}

// Namespace opens a namespace. It returns the same pointer for the same namespace. Before it returns, the text and the plans
// are durable in every root, because without them a restarted host cannot read the pieces.
func (s *Store) Namespace(ctx context.Context, n *kv.Namespace) (*catalog.Namespace, error) {
	if err := n.Validate(); err != nil {
		return nil, err
	}
	if s.closed.Load() {
		return nil, ErrClosed
	}
	ns, err := s.catalog.Open(ctx, n)
	if err != nil {
		return nil, fmt.Errorf("store: %w", err)
	}
	return ns, nil
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

// storeCounters are counters of the whole store.
type storeCounters struct {
	refused, resident, lookups, keys, hits atomic.Uint64
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

type candidate struct {
	ask    [1]abi.Candidate
	answer [1]bool
}
