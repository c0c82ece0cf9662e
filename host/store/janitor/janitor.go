package janitor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/policy"
	"github.com/kvhost/kvhost/host/store/health"
	"github.com/kvhost/kvhost/host/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
)

// Options of a janitor. Capacity is required.
type Options struct {
	FS          staging.FS
	Log         *slog.Logger
	Capacity    int64          // bytes on disk, of all files
	Low         float64        // part of the capacity that is evicted down to; 0: 0.9
	Evict       *policy.Module // nil: the built-in one
	EvictConfig policy.Config
	Place       *policy.Module // reads the names of files; nil: the built-in one
	PlaceConfig policy.Config
	Namespaces  []string      // texts, besides those that the directory tells
	TempAge     time.Duration // *.tmp that were not written to for so long go; 0: none
	Seed        uint64
	DryRun      bool // nothing is removed

	Progress func(files, bytes int64) // called from several goroutines after each file
}

// Usage is a number of files and the bytes that they take on disk.
type Usage struct {
	Files int64 `json:"files"`
	Bytes int64 `json:"bytes"`
}

func (u *Usage) add(bytes int64) { u.Files++; u.Bytes += bytes }

// Round is what one round found and did.
type Round struct {
	Dir         string        `json:"dir"`
	Capacity    int64         `json:"capacity"`
	DryRun      bool          `json:"dry_run,omitempty"`
	Entries     int           `json:"entries"` // that are there afterwards
	Files       Usage         `json:"files"`   // of entries, before
	Unknown     Usage         `json:"unknown"` // left alone
	Temporaries Usage         `json:"temporaries"`
	Removed     Usage         `json:"removed"`
	Used        int64         `json:"used"`   // bytes of everything, afterwards
	Spared      int           `json:"spared"` // victims that were used since the round began
	Failed      int           `json:"failed"` // files that could not be removed
	Took        time.Duration `json:"took_ns"`
}

// Janitor bounds one directory.
type Janitor struct {
	o        Options
	fs       staging.FS
	dir      string
	locks    []io.Closer // of a host's root; nil where no host has been
	disowned bool        // it was a host's root, and its index is removed
	place    *policy.Place
	known    map[string]bool // texts
	names    []chunk.Digest

	evict   *policy.Evict
	max     uint32 // slots of evict
	entries map[id]*entry
	slots   []*entry
	free    []uint32
	rounds  int
	linked  map[inode]found // of the round
	fallen  bool            // the policy failed, and the built-in one is in its place
}

type id struct {
	namespace, group uint32
	key              chunk.Key
}

type entry struct {
	slot   uint32
	print  uint64
	files  []file
	used   time.Time
	told   time.Time // the use that the policy knows of
	spared int       // the last round in which it was
}

type file struct {
	rel   string
	bytes int64
	inode inode // of a file with several names
}

func (e *entry) bytes() (n int64) {
	for _, f := range e.files {
		n += f.bytes
	}
	return n
}

const (
	defaultLow    = 0.9
	maxNamespaces = 4096
	maxAsked      = 256
	leastSlots    = 1 << 12
)

// New opens a directory. Nothing is read or removed before the first Round.
func New(ctx context.Context, dir string, o Options) (*Janitor, error) {
	if o.Low == 0 {
		o.Low = defaultLow
	}
	if o.Capacity <= 0 || !(0 < o.Low && o.Low <= 1) {
		return nil, fmt.Errorf("%w: a capacity of %d bytes, a low mark of %g", ErrConfig, o.Capacity, o.Low)
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Place == nil {
		o.Place = policy.Builtin(abi.RolePlace)
	}
	if o.Evict == nil {
		o.Evict = policy.Builtin(abi.RoleEvict)
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrConfig, err)
	}
	if o.FS == nil {
		o.FS = staging.Below(dir)
	}
	j := &Janitor{o: o, fs: o.FS, dir: dir, known: map[string]bool{}, entries: map[id]*entry{}}
	if info, err := o.FS.Stat(dir); err != nil || !info.IsDir() {
		return nil, fmt.Errorf("%w: %s: %w", ErrConfig, dir, cmp.Or(err, fs.ErrInvalid))
	}
	if err := j.claim(); err != nil {
		return nil, err
	}
	if j.place, err = o.Place.NewPlace(ctx,
		policy.PlaceOptions{Seed: o.Seed, Config: o.PlaceConfig, MaxNamespaces: maxNamespaces}); err != nil {
		return nil, errors.Join(err, j.Close())
	}
	return j, nil
}

// claim sees that no host has the directory, and that none takes it. A directory that is no host's root can become one,
// so each round asks again.
func (j *Janitor) claim() (err error) {
	if j.locks != nil {
		return nil
	}
	if _, err := j.fs.Stat(j.dir + "/" + pieceformat.MetaDir); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	list, err := j.fs.ReadDir(j.dir + "/" + pieceformat.MetaDir)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrConfig, err)
	}
	for _, e := range list {
		if e.Name() == "shared" {
			return fmt.Errorf("%w: %s is shared by hosts, which elect an evictor", ErrInUse, j.dir)
		}
	}
	if j.locks, err = health.Lock(j.fs, j.dir, j.dir+"/"+pieceformat.LockFile, true, nil); err != nil {
		return fmt.Errorf("%w: %w", ErrInUse, err)
	}
	return nil
}

// disown removes, durably and before anything else goes, the index that a host has left of its root: the next one would
// promise what is gone.
func (j *Janitor) disown() error {
	if j.locks == nil || j.disowned {
		return nil
	}
	err := j.fs.Remove(j.dir + "/" + pieceformat.CheckpointFile)
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		err = j.fs.SyncDir(j.dir + "/" + pieceformat.MetaDir)
	}
	j.disowned = err == nil
	return err
}

// Close gives the directory back.
func (j *Janitor) Close() error {
	var errs []error
	if j.evict != nil {
		errs = append(errs, j.evict.Close())
	}
	if j.place != nil {
		errs = append(errs, j.place.Close())
	}
	errs = append(errs, health.Unlock(j.locks))
	return errors.Join(errs...)
}

// Round goes through the directory once and removes what is too much. The error is [ErrOver] when that was not enough.
func (j *Janitor) Round(ctx context.Context) (*Round, error) {
	start := time.Now()
	r := &Round{Dir: j.dir, Capacity: j.o.Capacity, DryRun: j.o.DryRun}
	if err := j.claim(); err != nil {
		return r, err
	}
	if err := j.learn(); err != nil {
		return r, fmt.Errorf("janitor: %s: %w", j.dir, err)
	}
	j.rounds++
	if err := j.look(ctx, r); err != nil {
		return r, fmt.Errorf("janitor: %s: %w", j.dir, err)
	}
	if err := j.tell(ctx); err != nil {
		return r, err
	}
	r.Used = r.Files.Bytes + r.Unknown.Bytes + r.Temporaries.Bytes - r.Removed.Bytes
	if r.Used > j.o.Capacity {
		if err := j.shrink(ctx, r); err != nil {
			return r, err
		}
	}
	r.Entries, r.Took = len(j.entries), time.Since(start)
	if r.Used > j.o.Capacity {
		return r, fmt.Errorf("%w: %s takes %d bytes of %d; %d are of files that cannot be identified", ErrOver, j.dir, r.Used,
			j.o.Capacity, r.Unknown.Bytes)
	}
	return r, nil
}

// learn tells the place policy of namespaces that are new.
func (j *Janitor) learn() error {
	texts, err := j.namespaces()
	if err != nil {
		return err
	}
	for _, text := range texts {
		if j.known[text] || len(j.names) == maxNamespaces {
			continue
		}
		if err := j.place.Namespace(uint32(len(j.names)), text); err != nil {
			return err
		}
		j.known[text] = true
		j.names = append(j.names, chunk.TextDigest([]byte(text)))
	}
	return nil
}

// look goes through the directory.
func (j *Janitor) look(ctx context.Context, r *Round) error {
	var mu sync.Mutex
	for _, e := range j.entries {
		e.files = e.files[:0]
	}
	j.linked = map[inode]found{}
	visit := func(rel string, e fs.DirEntry) {
		if !e.Type().IsRegular() {
			return
		}
		info, err := j.fs.Stat(j.dir + "/" + rel)
		if err != nil {
			return // it has gone
		}
		who, known := j.identify(rel)
		mu.Lock()
		defer mu.Unlock()
		switch f := j.count(rel, info); {
		case known:
			r.Files.add(f.bytes)
			j.enter(who, f, lastUse(info))
		case strings.HasSuffix(rel, ".tmp") && j.o.TempAge > 0 && time.Since(info.ModTime) > j.o.TempAge:
			r.Temporaries.add(f.bytes)
			j.remove(f, r)
		default:
			r.Unknown.add(f.bytes)
		}
		if j.o.Progress != nil {
			j.o.Progress(1, info.Allocated)
		}
	}
	skipped := func(rel string, err error) {
		j.o.Log.Warn("a directory could not be read; what it holds is not counted", "directory", rel, "error", err)
	}
	return staging.Walk(ctx, j.fs, j.dir, runtime.GOMAXPROCS(0), visit, skipped)
}

func lastUse(info staging.Info) time.Time {
	if info.Accessed.After(info.ModTime) {
		return info.Accessed
	}
	return info.ModTime
}

func (j *Janitor) identify(rel string) (id, bool) {
	p, err := j.place.Identity([]byte(rel))
	if err != nil || p.Known != 1 || int(p.Namespace) >= len(j.names) {
		return id{}, false
	}
	return id{p.Namespace, p.Group, p.Key}, true
}

func (j *Janitor) enter(who id, f file, used time.Time) {
	e := j.entries[who]
	if e == nil {
		e = &entry{slot: abi.None, print: chunk.Fingerprint(j.names[who.namespace], who.group, who.key)}
		j.entries[who] = e
	}
	e.files = append(e.files, f)
	if used.After(e.used) {
		e.used = used
	}
}

// shrink removes victims down to the low mark.
func (j *Janitor) shrink(ctx context.Context, r *Round) error {
	who := make(map[*entry]id, len(j.entries))
	for k, e := range j.entries {
		who[e] = k
	}
	low := int64(j.o.Low * float64(j.o.Capacity))
	var slots [maxAsked]uint32
	for r.Used > low {
		if err := ctx.Err(); err != nil {
			return err
		}
		n, err := j.evict.Victims(abi.Ask{Bytes: uint64(r.Used - low), MaxVictims: maxAsked, Tenant: abi.None}, slots[:])
		if err != nil {
			if j.fallen {
				return err
			}
			j.replace(err)
			continue
		}
		went := 0
		for _, slot := range slots[:n] {
			if r.Used <= low {
				break
			}
			if slot >= uint32(len(j.slots)) || j.slots[slot] == nil {
				continue
			}
			e := j.slots[slot]
			if !j.goes(e, r) {
				if e.spared != j.rounds { // named for the first time, and it is not the oldest any more
					e.spared = j.rounds
					went++
				}
				continue
			}
			went++
			j.forget(who[e], e)
		}
		if went == 0 {
			return nil // it names none that may go: the round says whether that is too much
		}
	}
	return nil
}

// goes removes an entry's files, unless one was used since the round looked at it.
func (j *Janitor) goes(e *entry, r *Round) bool {
	for _, f := range e.files {
		info, err := j.fs.Stat(j.dir + "/" + f.rel)
		if err == nil && lastUse(info).After(e.used) {
			e.used = lastUse(info)
			e.told = e.used
			j.send(e, abi.OpTouch)
			r.Spared++
			return false
		}
	}
	left := e.files[:0]
	for _, f := range e.files {
		if !j.remove(f, r) {
			left = append(left, f)
		}
	}
	e.files = left
	return len(left) == 0
}

func (j *Janitor) remove(f file, r *Round) bool {
	if !j.o.DryRun {
		if err := j.disown(); err != nil {
			j.o.Log.Warn("nothing is removed: the next host would believe that it is there", "error", err)
			r.Failed++
			return false
		}
		if err := j.fs.Remove(j.dir + "/" + f.rel); err != nil && !errors.Is(err, fs.ErrNotExist) {
			j.o.Log.Warn("a file could not be removed", "file", f.rel, "error", err)
			r.Failed++
			return false
		}
	}
	bytes := j.freed(f)
	r.Removed.add(bytes)
	r.Used -= bytes
	return true
}
