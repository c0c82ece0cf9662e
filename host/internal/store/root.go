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

// quarantineShare is the part of a root's capacity, 1/n, that its quarantine may take.
const quarantineShare = 16

// root is one directory: its entries, its files, and plain code between its medium and its [owner].
type root struct {
	entries.Set
	*files.Dir
	store  *Store
	cfg    RootConfig
	owner  owner
	budget writeBudget

	kept      *keptDir // files that the store keeps for itself
	recovery  *recovery
	directory *health.Directory
	meter     meter

	level      *level
	origin     moves.Origin   // of what is copied to other levels
	evicting   *staging.Turns // the turn to reserve: held by the one reservation that may evict. nil: the evictor of several hosts does
	leaving    moves.Leaving  // for the next level
	upkeepWake chan struct{}

	unavailable atomic.Bool   // it could not be opened: see openLate
	scanned     chan struct{} // closed when it is known what is there
	entered     atomic.Int64  // pieces
	some        chan struct{} // closed when there are enough for the speed of reads to be measured

	suspects marks        // entries with files that gave no answer
	twice    atomic.Int64 // bytes that may be both a reservation's and an orphan's, while puts end
}

// meter measures the root's files, and whether compression saves time there: gain is nil where that is not asked.
type meter struct {
	staging.Meter
	gain *codec.Root
}

// openRoot makes a root with its evict policy. Nothing of its directory is looked at yet.
func openRoot(ctx context.Context, s *Store, cfg RootConfig) (*root, error) {
	log := s.log.With("root", cfg.Path)
	r := &root{
		store: s, cfg: cfg, upkeepWake: make(chan struct{}, 1), level: s.at(cfg.Level), scanned: make(chan struct{}), some: make(chan struct{}),
	}
	changes, copies := s.changes, s.copies
	if cfg.Lender != nil { // what others have is no change of what is here
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

// take makes the directories and takes the lock. No piece is looked at yet. A dry store looks whether it could, and keeps no lock.
func (r *root) take(ctx context.Context) (err error) {
	dry := r.store.cfg.Dry
	if dry && r.cfg.NoDirectory {
		return nil
	}
	missing, err := health.MissingRoot(r.FS, r.Path, r.cfg.RequireMount)
	if err == nil && missing {
		if making := r.store.cfg.Making; making != nil && !dry && !r.cfg.NoDirectory && !r.unavailable.Load() { // a host that runs has its addresses
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
	// What the root holds is only as durable as its own name.
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

// file is the name of one of the store's own files in the root. Where hosts share it each has its own.
func (r *root) file(base string) string {
	if r.cfg.Shared {
		return base + "." + r.store.cfg.HostID
	}
	return base
}

// ownsTemp says whether a temporary of an earlier run of a host is this host's to remove.
func (r *root) ownsTemp(host string) bool { return !r.cfg.Shared || host == r.store.cfg.HostID }

// identify says whether the directory is one to continue with, and whether it is empty. Where hosts share it, it is the one that was
// there when this host joined. Of a bucket only requests tell: the root itself, and temporaries, are there without a server.
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

// answers fails unless the server of a bucket answers.
func (r *root) answers(probe string) error {
	bare, name := r.Health.Bare(), r.Slash+probe
	err := pieceformat.ReplaceFile(bare, r.store.seq.TempName(name), name, true, pieceformat.Holding([]byte("kvhost probe\n")))
	if err == nil {
		err = errors.Join(health.ReadThrough(bare, name, pieceformat.Page), bare.Remove(name))
	}
	return err
}

// forget removes a file of the catalog that this host has no use for. Where hosts share the root another may have one. A file that stays
// is tried again at the next start.
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

// wake wakes whoever waits for a channel of one element.
func wake(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// invites says whether stores should go to the root.
func (r *root) invites() bool {
	_, plenty := r.budget.Left()
	return plenty && r.Health.State() == health.In
}

// path is where the file of a piece stands, given its name: empty for the built-in one.
func (r *root) path(name string, cl *catalog.Class, key *kv.Key, rank uint32) string {
	if name != "" {
		return r.Slash + name
	}
	var room [512]byte
	return string(cl.AppendBuiltin(append(room[:0], r.Slash...), key, rank))
}

// victim is where the file of an evicted entry's piece stands.
func (r *root) victim(v *entries.Eviction, rank uint32) string {
	name, _ := pieceformat.NameOf(v.Names, rank)
	return r.path(name, v.Class, &v.Key, rank)
}

// metered observes a file's transfers where there is a choice to be made by them: of roots, or whether to compress.
func (r *root) metered(f staging.File) staging.File {
	if len(r.store.roots) < 2 && r.meter.gain == nil {
		return f
	}
	return r.meter.File(f)
}

// facts are what the place policy is told.
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

// A root belongs to one host, which holds the lock file and the directory for as long as it runs, or to several. Each of
// those holds a lock file with its name, against a second host of that name, and the common one only while it joins: from
// then on its directory among the hosts' says that it is there, on other machines too, where a lock may not reach.

func (r *root) lockRoot(ctx context.Context) error {
	if err := r.directory.Lock(); err != nil {
		return r.notLocked(err)
	}
	if err := r.owner.lock(ctx); err != nil {
		return errors.Join(err, r.directory.Close())
	}
	return nil
}

// tryLocks fails as lockRoot would at present. It makes no lock file.
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

// notLocked is the error of a lock that could not be taken.
func (r *root) notLocked(err error) error {
	if errors.Is(err, staging.ErrLocked) {
		return fmt.Errorf("%w: %s: %w; stop the other host, give this one a root of its own, or set shared = true on both",
			ErrRootBusy, r.Path, err)
	}
	return fmt.Errorf("store: root %s: %w", r.Path, err)
}

// holds says whether a root in service has an entry in a state.
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

// isAllocating says that memory for so many bytes more will be there, and is not yet.
func (r *root) isAllocating(bytes int64) bool {
	there, more := r.allocated()
	return more && r.Account.Figures().Used+bytes > there
}

// allocated is the memory that is there, and whether more will be.
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

// ready is how many bytes more can be taken at once without anything going.
func (r *root) ready() int64 {
	room := -r.Account.Excess(1)
	if there, more := r.allocated(); more {
		room = min(room, there-r.Account.Figures().Used)
	}
	return room
}

// evictPolicy takes a reference to a policy that is about to evict; nil is the built-in one.
func (s *Store) evictPolicy(h *policy.Handle) *evictor.Policy {
	if h == nil {
		h = policy.BuiltinHandle(abi.RoleEvict)
	} else {
		h.Acquire()
	}
	return &evictor.Policy{Handle: h, Since: s.cfg.Now()}
}

// marks collects entries. It has its own lock, which is taken after the root's.
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
