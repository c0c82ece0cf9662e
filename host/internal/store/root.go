package store

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path/filepath"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/codec"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/store/capacity"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/evictor"
	"github.com/kvhost/kvhost/host/internal/store/files"
	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/store/moves"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// quarantineShare is the divisor of a root's capacity that gives the most bytes of its quarantine.
const quarantineShare = 16

// root combines its entries and its files. It is plain code between its medium and its [owner].
type root struct {
	entries.Set
	*files.Dir
	store  *Store
	cfg    RootConfig
	owner  owner
	budget writeBudget

	kept      *keptDir // the store's own files
	recovery  *recovery
	directory *health.Directory
	meter     meter

	level      *level
	origin     moves.Origin   // source of copies to other levels
	evicting   *staging.Turns // held by the one reservation that may evict; nil if other hosts write too, since an elected one evicts
	leaving    moves.Leaving  // entries that leave for the next level
	upkeepWake chan struct{}

	unavailable atomic.Bool   // the root could not be opened: see openLate
	scanned     chan struct{} // closed when all entries are known
	entered     atomic.Int64  // number of pieces entered
	some        chan struct{} // closed when there are enough pieces to measure the speed of reads

	suspects marks        // entries with files that gave no answer
	twice    atomic.Int64 // bytes that may be counted both as reserved and as orphans while puts end
}

// meter measures the transfers of the root's files, and the gain of compression. gain is nil if compression does not depend on
// it.
type meter struct {
	staging.Meter
	gain *codec.Root
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
	r.budget = newWriteBudget(r)
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

func (r *root) close() error {
	r.owner.leave()
	r.Lock()
	defer r.Unlock()
	err := errors.Join(r.Evictor.Close(), r.directory.Close())
	r.Health.Close()
	return err
}

// file returns the name of one of the store's own files in the root. In a shared root each host has its own file.
func (r *root) file(base string) string {
	if r.cfg.Shared {
		return base + "." + r.store.cfg.HostID
	}
	return base
}

// ownsTemp reports whether a temporary of an earlier run of a host is this host's to remove.
func (r *root) ownsTemp(host string) bool { return !r.cfg.Shared || host == r.store.cfg.HostID }

// identify checks that the directory may be used, and reports whether it is empty. A shared root must be the one that this host
// has joined. A bucket is checked by requests, because its root and its temporaries exist without a server.
func (r *root) identify() (empty bool, err error) {
	if !r.cfg.Shared {
		empty, err = r.directory.Adopt()
	} else if err = r.directory.Same(); err != nil {
		err = fmt.Errorf("%w, and shared: restart kvhost to join it", err)
	}
	if err == nil && r.cfg.Remote {
		err = r.answers(r.file(pieceformat.ProbeFile))
	}
	return empty, err
}

// answers returns an error if the server of a bucket does not answer.
func (r *root) answers(probe string) error {
	bare, name := r.Health.Bare(), r.Slash+probe
	err := pieceformat.ReplaceFile(bare, r.store.seq.TempName(name), name, true, pieceformat.Holding([]byte("kvhost probe\n")))
	if err == nil {
		err = errors.Join(health.ReadThrough(bare, name, pieceformat.Page), bare.Remove(name))
	}
	return err
}

// forget removes a file of the catalog that this host does not need. In a shared root it does nothing, because another host may
// need the file. After a failure the next start tries again.
func (r *root) forget(dir, base string) {
	if r.cfg.Shared {
		return
	}
	for _, dir := range pieceformat.Copies(dir) {
		if err := r.FS.Remove(r.Slash + dir + "/" + base); err != nil && !errors.Is(err, fs.ErrNotExist) {
			r.Log.Warn("file that nothing needs not removed; the next start tries again", "file", base, "error", err)
		}
	}
}

// wake wakes the goroutine that waits for a channel with a buffer of one.
func wake(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// invites reports whether new entries should be stored in the root.
func (r *root) invites() bool {
	_, plenty := r.budget.Left()
	return plenty && r.Health.State() == health.In
}

// path returns the path of a piece's file. An empty name stands for the built-in one.
func (r *root) path(name string, cl *catalog.Class, key *kv.Key, rank uint32) string {
	if name != "" {
		return r.Slash + name
	}
	var room [512]byte
	return string(cl.AppendBuiltin(append(room[:0], r.Slash...), key, rank))
}

// victim returns the path of the file of an evicted entry's piece.
func (r *root) victim(v *entries.Eviction, rank uint32) string {
	name, _ := pieceformat.NameOf(v.Names, rank)
	return r.path(name, v.Class, &v.Key, rank)
}

// metered returns a file with measured transfers if a decision depends on them: the choice of a root, or whether to compress.
func (r *root) metered(f staging.File) staging.File {
	if len(r.store.roots) < 2 && r.meter.gain == nil {
		return f
	}
	return r.meter.File(f)
}

// facts returns the facts about the root for the place policy.
func (r *root) facts(id int) abi.RootFacts {
	r.Lock()
	defer r.Unlock()
	a := r.Account.Figures()
	var flags uint32
	if left, _ := r.budget.Left(); left && r.Health.Takes() {
		flags = abi.RootWritable
	}
	return abi.RootFacts{
		ID: uint32(id), Flags: flags, Capacity: uint64(a.Capacity), Free: uint64(max(0, a.Limit-a.Used)),
		ReadBps: r.meter.Reads.BytesPerSecond(), WriteBps: r.meter.Writes.BytesPerSecond(),
	}
}

// A root belongs to one host, which holds the lock file and the directory's lock while it runs, or to several hosts. Each of
// these holds a lock file with its own name, which excludes a second host with that name. It holds the common lock file only
// while it joins. From then on, its directory among those of the hosts shows that it is present, even on other machines that
// locks may not reach.

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

// holds reports whether one of the roots that are in service has an entry in the given state.
func holds(roots []*root, fp uint64, state uint8) bool {
	for _, r := range roots {
		if !r.Health.Serves() {
			continue
		}
		r.Lock()
		there := r.Has(fp, state)
		r.Unlock()
		if there {
			return true
		}
	}
	return false
}

// isAllocating reports whether the index memory for another put of the given bytes is still being allocated.
func (r *root) isAllocating(bytes int64) bool {
	there, more := r.allocated()
	return more && r.Account.Figures().Used+bytes > there
}

// allocated returns the allocated memory, and whether more is being allocated.
func (r *root) allocated() (bytes int64, more bool) {
	if !r.cfg.Volatile {
		return 0, false
	}
	space, err := r.cfg.FS.Statfs(r.Path)
	if err != nil || space.Available == space.Free {
		return 0, false
	}
	return space.Total - space.Free + space.Available, true
}

// ready returns the bytes that the root can take now without an eviction.
func (r *root) ready() int64 {
	room := -r.Account.Excess(1)
	if there, more := r.allocated(); more {
		room = min(room, there-r.Account.Figures().Used)
	}
	return room
}

// evictPolicy takes a reference to a policy that is about to evict. nil stands for the built-in one.
func (s *Store) evictPolicy(h *policy.Handle) *evictor.Policy {
	if h == nil {
		h = policy.BuiltinHandle(abi.RoleEvict)
	} else {
		h.Acquire()
	}
	return &evictor.Policy{Handle: h, Since: s.cfg.Now()}
}

// marks is a list of entries. Its lock is taken after the root's.
type marks struct {
	mu   sync.Mutex
	list []entries.Mark
}

func (m *marks) add(more ...entries.Mark) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.list = append(m.list, more...)
}

func (m *marks) take() (list []entries.Mark) {
	m.mu.Lock()
	defer m.mu.Unlock()
	list, m.list = m.list, nil
	return list
}

// drop removes an entry that does not, or no longer, match its files. The lock must not be held.
func (r *root) drop(m entries.Mark) {
	r.Evict(m, func(v *entries.Eviction) { _, _ = r.owner.unlink(v, v.Pieces) }) // it logs failures and retries
}
