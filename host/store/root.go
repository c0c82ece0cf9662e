package store

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"path/filepath"
	"sync"
	"sync/atomic"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/policy"
	"github.com/kvhost/kvhost/host/store/index"
	"github.com/kvhost/kvhost/staging"
)

// root is one directory with its index, its bytes and its evict policy.
type root struct {
	store   *Store
	cfg     RootConfig
	dir     string     // absolute
	slash   string     // dir and a slash
	fs      staging.FS // watched
	log     *slog.Logger
	lock    io.Closer
	gate    io.Closer     // of a shared root, until this host has joined the others
	fellows *fellows      // nil: this host has the root to itself
	kick    chan struct{} // wakes the background evictor

	watched *staging.WatchedFS
	bare    *staging.WatchedFS // for probes: admits everything, and what fails there has no consequences
	health  health
	nudge   chan struct{} // wakes the upkeep
	away    atomic.Bool   // it could not be opened: see arrive
	self    staging.Info  // the directory
	orphans orphans
	budget  budget

	turn       latch // held by the one reservation that may evict
	succession latch // held by who tells a policy what is here, so that it can take over

	reads, writes speed // of single transfers

	unsure atomic.Uint32 // batches that could not be made durable

	lasting  sync.Map // directories whose names are durable
	lastingN atomic.Int64

	scanned chan struct{}          // closed when it is known what is there
	census  atomic.Pointer[census] // of the scan under way, or nil

	mu       sync.Mutex
	scanning bool
	blind    bool                // the scan could not read something
	unseen   int64               // most that files may take which the scan has not come to; part of used
	forgone  map[uint64]struct{} // fingerprints of entries that left during the scan
	settled  sync.Cond           // on mu: a leaving entry is gone
	x        *index.Index
	flights  map[uint32]flight
	evict    *policy.Evict
	acting   *bound     // what evict comes from
	standin  *recency   // answers while evict is down, else nil
	next     *successor // a policy that is about to take over, or nil
	owned    []int64    // of used, what entries of each tenant have, where there are quotas
	bounds   bounds     // what the file system leaves
	wanted   int64      // bytes that puts wait for
	vain     uint64     // rounds in which the background evictor has freed nothing
	used     int64      // bytes of entries (in flight and leaving ones too), quarantine and strays
	quar     quarantine
	complete int64 // entries with all their pieces
	stray    int64 // bytes of files that could not be unlinked
	unsynced []mark
	count    counters
	faulted  policy.Stats // of earlier instances of the acting policy
	victims  [maxAsked]uint32
	foretold foretold
	leaving  []departure // of the turn's holder
	called   called      // the turn's holder's too
	uncalled bool        // what it lists is to be named
}

// flight is what happens to an entry's files at present.
type flight struct {
	ranks     uint64 // pieces being written
	expelling bool   // its files are being unlinked
}

// maxLasting is how many directories are remembered as durable.
const maxLasting = 1 << 16

// mark names an entry so that a later one in the same slot is told apart.
type mark struct {
	slot  uint32
	print uint64
}

// openRoot makes a root with its evict policy. Nothing of its directory is looked at yet.
func openRoot(ctx context.Context, s *Store, cfg RootConfig) (_ *root, err error) {
	r := &root{
		succession: newLatch(),
		store:      s, cfg: cfg, dir: cfg.Path, slash: cfg.Path + "/", turn: newLatch(), log: s.log.With("root", cfg.Path), kick: make(chan struct{}, 1), nudge: make(chan struct{}, 1),
		x: index.New(cfg.MaxEntries, s.spaces.print, s.spaces.base), flights: map[uint32]flight{}, scanned: make(chan struct{}),
	}
	r.settled.L = &r.mu
	r.orphans.init()
	r.acting = s.evict
	if cfg.Evict != nil {
		r.acting = s.bind(abi.RoleEvict, *cfg.Evict)
	}
	if r.evict, err = r.newEvict(ctx, r.acting, policy.State{}); err != nil {
		return nil, fmt.Errorf("store: root %s: policy %s: %w", r.dir, r.acting.Name, err)
	}
	r.acting.hold()
	r.watched = staging.Watched(s.cfg.FS, staging.Watch{Limit: s.cfg.IOTimeout, Admit: r.admits, Seen: r.saw, Ended: r.ended})
	r.bare = staging.Watched(s.cfg.FS, staging.Watch{Limit: s.cfg.IOTimeout, Ended: r.ended})
	r.fs = r.watched
	return r, nil
}

// take makes the directories and takes the lock. No piece is looked at yet.
func (r *root) take(ctx context.Context) (err error) {
	for _, d := range ownDirs {
		if err := r.fs.MkdirAll(r.dir+"/"+d, 0o700); err != nil {
			return fmt.Errorf("store: root %s: %w", r.dir, err)
		}
	}
	// What the root holds is only as durable as its own name and those of the store's directories.
	for _, d := range []string{filepath.Dir(r.dir), r.dir, r.dir + "/" + metaDir} {
		if err := r.fs.SyncDir(d); err != nil && !(errors.Is(err, fs.ErrPermission) && d == filepath.Dir(r.dir)) {
			return fmt.Errorf("store: root %s: %w: %w", r.dir, ErrSync, err)
		}
	}
	if r.self, err = r.fs.Stat(r.dir); err != nil {
		return fmt.Errorf("store: root %s: %w", r.dir, err)
	}
	if r.lock, err = r.occupy(ctx); err != nil {
		return err
	}
	r.sweepMeta()
	if err = r.loadWritten(); err != nil {
		return fmt.Errorf("store: root %s: %w", r.dir, err)
	}
	return nil
}

func (r *root) newEvict(ctx context.Context, b *bound, state policy.State) (*policy.Evict, error) {
	return b.Module.NewEvict(ctx, policy.EvictOptions{
		MaxSlots: r.cfg.MaxEntries, Capacity: uint64(r.cfg.Capacity), Seed: r.store.cfg.Seed, Config: b.Config, State: state,
	})
}

func (r *root) close() error {
	if r.fellows != nil {
		r.fellows.leave()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.openGate()
	err := r.evict.Close()
	if r.lock != nil {
		err = errors.Join(err, r.lock.Close())
	}
	r.acting.release()
	r.endWatch()
	return err
}

func (r *root) endWatch() {
	r.watched.Close()
	r.bare.Close()
}

// ended is told when an operation that was given up has ended.
func (r *root) ended(staging.Op, string) {
	select {
	case r.nudge <- struct{}{}:
	default:
	}
}

// facts are what the place policy is told.
func (r *root) facts(id int) abi.RootFacts {
	r.mu.Lock()
	defer r.mu.Unlock()
	var flags uint32
	if r.takes() && r.budget.left(r.store.cfg.Now()) {
		flags = abi.RootWritable
	}
	return abi.RootFacts{
		ID: uint32(id), Flags: flags, Capacity: uint64(r.cfg.Capacity), Free: uint64(max(0, r.limit()-r.used)),
		ReadBps: r.reads.bps.Load(), WriteBps: r.writes.bps.Load(),
	}
}

// room is the part of the root that is free.
func (r *root) room() float64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return float64(r.limit()-r.used) / float64(r.cfg.Capacity)
}

func (r *root) classOf(slot uint32) *class { return r.store.spaces.class(r.x.Owner(slot).Class) }

func (r *root) tenantOf(slot uint32) uint32 { return r.store.spaces.tenantOf(r.x.Owner(slot).Tenant) }
