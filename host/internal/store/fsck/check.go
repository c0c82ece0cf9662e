package fsck

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvhost/kvhost/host/internal/store/files"
	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/store/moves"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/internal/store/shared"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// Options configures a check. The zero value reads everything and changes nothing.
type Options struct {
	FS        staging.FS
	Workers   int           // number of files checked concurrently; two per processor if 0
	ReadLimit int64         // limit in bytes per second of all workers; unlimited if 0
	Quick     bool          // reads headers and sizes only
	Repair    bool          // repairs problems; see the package comment
	TempAge   time.Duration // age since the last write at which a temporary counts as abandoned; 1 h if 0
	Alone     bool          // the root is a bucket. A repair holds its lock throughout, since an object cannot be renamed while a host uses it.
	Most      int           // maximum number of problems listed; 10,000 if 0. All are counted and repaired.

	Progress func(files, bytes int64) // called from several goroutines after each file
}

const (
	defaultMost    = 10_000
	defaultTempAge = time.Hour
	slotBytes      = 4 << 20
)

// Check verifies a root. If it returns an error, the report covers the part that was checked. Problems in the root are not an
// error of Check; see [Report.Err].
func Check(ctx context.Context, dir string, o Options) (*Report, error) {
	var err error
	if !o.Alone {
		if dir, err = filepath.Abs(dir); err != nil {
			return nil, fmt.Errorf("%w: %s: %w", ErrRoot, dir, err)
		}
	}
	o.complete(dir)
	c := &check{
		o: o, dir: dir, disk: files.NewReader(o.FS, dir), rate: moves.Rate{PerSecond: o.ReadLimit}, texts: map[kv.Digest]string{}, plans: map[kv.Digest]*kv.Plan{},
		linked: map[inode]bool{},
		report: Report{Root: dir, Quick: o.Quick, Namespaces: map[kv.Digest]*Usage{}, Found: map[Kind]*Usage{}},
	}
	if info, err := o.FS.Stat(dir); err != nil || !info.IsDir() {
		return nil, fmt.Errorf("%w: %s: %w", ErrRoot, dir, cmp.Or(err, fs.ErrInvalid))
	}
	if list, err := o.FS.ReadDir(dir + "/" + pieceformat.MetaDir); err != nil || o.Alone && len(list) == 0 {
		return nil, fmt.Errorf("%w: %s has no directory %s: %w", ErrRoot, dir, pieceformat.MetaDir,
			cmp.Or(err, fs.ErrInvalid))
	}
	if o.Alone && o.Repair {
		locks, err := c.lock()
		if err != nil {
			return nil, fmt.Errorf("fsck: %s is repaired when no host has it: %w", dir, err)
		}
		defer func() { _ = health.Unlock(locks) }()
	} else {
		c.lookForHost()
	}
	if c.slots, err = staging.NewSlots(o.Workers, slotBytes); err != nil {
		return nil, fmt.Errorf("fsck: %w", err)
	}
	defer c.slots.Close()
	err = c.run(ctx)
	c.finish()
	return &c.report, err
}

// lookForHost sets Report.InUse if a host uses the root exclusively or hosts share a bucket. It takes the lock of an existing
// lock file for an instant.
func (c *check) lookForHost() {
	if _, err := c.o.FS.Stat(c.lockFile()); err == nil {
		locks, _ := c.lock()
		_ = health.Unlock(locks)
	} else if c.o.Alone {
		c.report.InUse = c.unshared() != nil
	}
}

func (c *check) lockFile() string { return c.dir + "/" + pieceformat.LockFile }

// lock takes the locks of the root. If a host holds them it sets Report.InUse and returns staging.ErrLocked.
func (c *check) lock() ([]io.Closer, error) {
	locks, err := health.Lock(c.o.FS, c.dir, c.lockFile(), true, nil)
	if err == nil && c.o.Alone {
		if err = c.unshared(); err != nil { // a host that joins later finds the lock
			_, locks = health.Unlock(locks), nil
		}
	}
	c.report.InUse = c.report.InUse || errors.Is(err, staging.ErrLocked)
	return locks, err
}

// unshared returns an error that lists the hosts that share a bucket. Such hosts hold no lock.
func (c *check) unshared() error {
	names, err := shared.Hosts(c.o.FS, c.dir)
	if err != nil || len(names) == 0 {
		return err
	}
	return fmt.Errorf("%w: hosts share it: %s; remove what is in %s/hosts of hosts that were killed",
		staging.ErrLocked, strings.Join(names, ", "), shared.Dir)
}

// Files counts the files that a check of the root will visit. It reads names only.
func Files(ctx context.Context, dir string, fsys staging.FS) (int64, error) {
	if fsys == nil {
		fsys = staging.Below(dir)
	}
	var n atomic.Int64
	disk := files.NewReader(fsys, dir)
	err := disk.Walk(ctx, "", runtime.GOMAXPROCS(0), func(string, files.FileKind) { n.Add(1) }, func(string, error) {})
	return n.Load(), err
}

func (o *Options) complete(dir string) {
	if o.FS == nil {
		o.FS = staging.Below(dir)
	}
	if o.Workers <= 0 {
		o.Workers = 2 * runtime.GOMAXPROCS(0)
	}
	if o.TempAge <= 0 {
		o.TempAge = defaultTempAge
	}
	if o.Most <= 0 {
		o.Most = defaultMost
	}
}

// check is one check of one root.
type check struct {
	o     Options
	dir   string
	disk  files.Reader
	slots *staging.Slots
	rate  moves.Rate
	bytes atomic.Int64 // bytes read so far

	kept  sync.Mutex           // guards texts and plans
	texts map[kv.Digest]string // texts of the namespaces
	plans map[kv.Digest]*kv.Plan

	mu     sync.Mutex // guards the fields below
	report Report
	linked map[inode]bool // files with several links that are already counted
	temps  []temporary
}

func (c *check) run(ctx context.Context) error {
	if err := c.meta(); err != nil {
		return err
	}
	pieces := make(chan string, 64)
	var workers sync.WaitGroup
	for range c.o.Workers {
		workers.Go(func() {
			slot, err := c.slots.Acquire(ctx)
			if err != nil {
				for range pieces { // The walk must not block.
				}
				return
			}
			defer slot.Release()
			for rel := range pieces {
				if ctx.Err() == nil {
					c.file(ctx, rel, slot.Bytes())
				}
			}
		})
	}
	visit := func(rel string, is files.FileKind) {
		switch is {
		case files.Temporary:
			c.temporary(rel)
		case files.Foreign:
			c.foreign(rel)
		default:
			pieces <- rel
			return
		}
		c.progress(0)
	}
	err := c.disk.Walk(ctx, "", c.o.Workers, visit, func(rel string, err error) {
		c.found(Problem{Path: rel, Kind: Unreadable, What: err.Error()})
	})
	close(pieces)
	workers.Wait()
	if err != nil {
		return fmt.Errorf("fsck: %s: %w", c.dir, err)
	}
	c.sweep()
	return c.quarantine()
}

func (c *check) progress(bytes int64) {
	if c.o.Progress != nil {
		c.o.Progress(1, bytes)
	}
}

// found adds a problem to the report, repaired or not.
func (c *check) found(p Problem) {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := &c.report
	if r.Found[p.Kind] == nil {
		r.Found[p.Kind] = &Usage{}
	}
	r.Found[p.Kind].add(p.Bytes)
	switch {
	case p.Done != "":
		r.Repaired++
	case p.Kind != Misnamed:
		r.Remaining++
	}
	if p.Done == "" {
		p.Advice = advice[p.Kind]
	}
	if len(r.Problems) == c.o.Most {
		r.Left++
		return
	}
	r.Problems = append(r.Problems, p)
}

// inode identifies a file independently of its names.
type inode struct{ dev, ino uint64 }

// taken returns the allocated bytes of a file, or 0 if the file was counted under another name. c.mu must be held.
func (c *check) taken(info staging.Info) int64 {
	if info.Links > 1 {
		at := inode{info.Dev, info.Ino}
		if c.linked[at] {
			return 0
		}
		c.linked[at] = true
	}
	return info.Allocated
}

func (c *check) foreign(rel string) {
	info, err := c.o.FS.Stat(c.dir + "/" + rel)
	c.mu.Lock()
	defer c.mu.Unlock()
	var bytes int64
	if err == nil && info.Mode.IsRegular() {
		bytes = c.taken(info)
	}
	c.report.Foreign.add(bytes)
}

func (c *check) sound(h *pieceformat.Header, info staging.Info) {
	c.mu.Lock()
	defer c.mu.Unlock()
	allocated := c.taken(info)
	c.report.Pieces.add(allocated)
	if h.Version() == pieceformat.CompressedVersion {
		c.report.Compressed.add(allocated)
		c.report.Compressed.Payload += h.Payload
	}
	u := c.report.Namespaces[h.Namespace]
	if u == nil {
		u = &Usage{}
		c.report.Namespaces[h.Namespace] = u
	}
	u.add(allocated)
}

// finish completes the report and sorts it, so that its order does not depend on the workers.
func (c *check) finish() {
	r := &c.report
	r.Read = c.bytes.Load()
	slices.SortFunc(r.Problems, func(a, b Problem) int {
		return cmp.Or(cmp.Compare(a.Path, b.Path), cmp.Compare(a.Kind, b.Kind))
	})
	for d, u := range r.Namespaces {
		r.Spaces = append(r.Spaces, SpaceUsage{Namespace: d.String(), Model: kv.Field(c.texts[d], "model"), Usage: *u})
	}
	slices.SortFunc(r.Spaces, func(a, b SpaceUsage) int {
		return cmp.Or(-cmp.Compare(a.Bytes, b.Bytes), cmp.Compare(a.Namespace, b.Namespace))
	})
	r.Plans = len(c.plans)
}

// file checks a file that is not a temporary. If it is bad, a repair takes it out of the root.
func (c *check) file(ctx context.Context, rel string, buf []byte) {
	v, err := c.settled(ctx, rel, buf)
	c.progress(v.read)
	p := Problem{Path: rel, Bytes: v.info.Allocated}
	switch {
	case ctx.Err() != nil, errors.Is(err, fs.ErrNotExist):
		return
	case err == nil:
		c.sound(&v.header, v.info)
		if v.misnamed {
			p.Kind, p.What = Misnamed, "its header has another name"
			c.found(p)
		}
		return
	case errors.Is(err, errChanging):
		c.mu.Lock()
		c.report.Changing++
		c.mu.Unlock()
		return
	case errors.Is(err, pieceformat.ErrNotPiece), errors.Is(err, pieceformat.ErrDamaged) && v.info.Size < pieceformat.Page:
		if !pieceformat.IsBuiltin([]byte(rel)) && !v.blank {
			c.foreign(rel)
			return
		}
		p.Kind = Damaged
	case errors.Is(err, pieceformat.ErrUnknownFormat):
		p.Kind, p.What = Later, err.Error()
		c.found(p)
		return
	case errors.Is(err, pieceformat.ErrWrongPiece):
		p.Kind = WrongPiece
	case errors.Is(err, errUnknownNamespace):
		p.Kind = Orphan
	case errors.Is(err, pieceformat.ErrUnknownPlan):
		p.Kind = NoPlan
	case pieceformat.IsDamage(err), errors.Is(err, kv.ErrChecksum):
		p.Kind = Damaged
	default:
		p.Kind, p.What = Unreadable, err.Error()
		c.found(p)
		return
	}
	p.What = err.Error()
	c.takeOut(&p, v.info)
	c.found(p)
}
