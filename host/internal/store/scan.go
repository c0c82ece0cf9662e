package store

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/store/capacity"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/files"
	"github.com/kvhost/kvhost/host/internal/store/health"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
)

// recovery restores the entries of a root at a start, and saves them at an orderly stop. It does so by scans and by the
// checkpoint.
//
// An orderly stop writes a checkpoint: the index with the state of the evict policy. If there is none, a scan examines every
// file and enters the pieces that it finds (beginScan, scan). The header of a file identifies the piece, and the walk gives its
// name. The [scanJudge] of the root decides about files that are not valid pieces, and about pieces that exist twice. A crash
// loses the order of last touch, so the order of storing replaces it.
//
// If names and sizes can be listed, a [listing] replaces the examination of every file, and the headers are read later.
//
// The store serves a root while it is scanned: lookups find the pieces that the scan has seen, and the pieces stored since.
// Until the scan has ended, the following rules apply.
//
//   - In addition to the entries seen, the account contains an upper bound of the bytes of all other files: everything in use on the file system. A put that does not fit is shed. Nothing is evicted, because the oldest entry is not known yet.
//   - A put first checks whether its file exists and has not been seen (seek). If so, the file is entered in the index, and the put fails as resident.
//   - The evict policy gets no events. At the end it is told about all entries in the order of last touch, a slice at a time. Entries touched since the scan began come last.
type recovery struct {
	root  *root
	kept  *keptDir
	set   *entries.Set
	judge scanJudge
	from  lister // set if scans list files; nil if they walk
	count scanCounters
	// The following fields are guarded by the set's lock.
	missed     map[string]int64 // unreadable files of the last scan: see scan.missed
	overlooked *int64           // in a shared root: bytes booked for files that are not served
	// incomplete is set if a scan could not read something.
	incomplete atomic.Bool

	current atomic.Pointer[scan] // the first scan while it is running, or nil
}

// scanCounters count since the store was opened.
type scanCounters struct {
	Scanned   atomic.Uint64 // files that scans have seen
	Swept     atomic.Uint64 // temporaries that were removed
	Foreign   atomic.Uint64 // files that do not belong to the store
	Unclaimed atomic.Uint64 // valid pieces of unknown namespaces or with invalid names
}

// scanJudge decides about the files that a scan finds. Its methods are called on several goroutines.
type scanJudge interface {
	// Found enters a piece. rel is its path below the root. name is the same path, or empty for the built-in name.
	Found(c *scan, rel, name string, cl *catalog.Class, h *pieceformat.Header, allocated int64)
	// Unsound decides about a file that is not a valid piece.
	Unsound(c *scan, name, rel string, info staging.Info, err error)
	// Unknown decides about a piece of an unknown namespace, or with a name that no piece can have.
	Unknown(c *scan, name string, allocated int64, err error)
}

// lister is a file system that lists the names and sizes of a thousand files at the cost of reading one header.
type lister interface {
	List(ctx context.Context, dir string, found func(rel string, size int64, modified time.Time)) error
}

// scan is one examination of every file of a root.
type scan struct {
	*entries.Scan
	by   *recovery
	late bool // after the scan has ended

	mu     sync.Mutex
	short  error            // the process was short of a resource, so the scan must be repeated
	missed map[string]int64 // unreadable files and directories (with a slash) by path below the root, with the bytes booked for them
}

// newScan begins a scan, or an examination of files after the scan.
func (r *recovery) newScan(late bool) *scan {
	return &scan{Scan: entries.NewScan(r.set, late), by: r, late: late, missed: map[string]int64{}}
}

// beginScan prepares the root for use during a scan. The bytes in use on the file system are the upper bound of the bytes that
// the scan will find.
func (r *recovery) beginScan() error {
	d := r.kept
	if _, err := d.FS.ReadDir(d.Path); err != nil {
		return err
	}
	// Files that are found count as stored, but their writer may have been killed before they were durable.
	if r.root.store.cfg.Strict {
		if err := d.FS.SyncFS(d.Path); err != nil {
			return d.SyncFailed(err)
		}
	}
	r.set.Lock()
	defer r.set.Unlock()
	r.set.BeginScan()
	unscanned := r.root.cfg.Capacity
	if space, err := d.FS.Statfs(d.Path); err == nil {
		unscanned = max(0, space.Total-space.Free)
	}
	r.set.Account.Add(capacity.Unscanned, unscanned)
	r.current.Store(r.newScan(false)) // before the first put, which looks for its own file
	return nil
}

// makeRoom reduces a root that a scan has found over its limit. It removes damaged files and incomplete entries, for which
// bytes of missing pieces are reserved. Otherwise complete entries would be evicted instead.
func (r *recovery) makeRoom() {
	s := r.set
	r.kept.Quarantine.Shrink(s.Account.Excess(1))
	if s.Account.Excess(1) <= 0 {
		return
	}
	var parts []entries.Mark
	s.Lock()
	s.Index.Each(func(slot uint32, e *index.Entry) {
		if !e.Any(index.Complete|index.Evicting) && !s.Busy(slot) && e.Pins() == 0 {
			parts = append(parts, entries.Mark{Slot: slot, Fingerprint: s.Index.Fingerprint(slot)})
		}
	})
	s.Unlock()
	for _, m := range parts {
		if s.Account.Excess(1) <= 0 {
			break
		}
		r.root.drop(m)
	}
}

// file examines one file, given its path below the root.
func (c *scan) file(rel string, is files.FileKind) {
	if c.by.count.Scanned.Add(1); is == files.Foreign {
		c.by.count.Foreign.Add(1)
		return
	}
	c.look(rel)
}

// look examines a file by its name and its header.
func (c *scan) look(rel string) {
	r, d := c.by, c.by.kept
	name := d.Slash + rel
	if temp, ok := pieceformat.ParseTemp(filepath.Base(rel)); ok {
		if !d.Sequence.Wrote(temp) && r.root.ownsTemp(temp.Host) {
			if err := r.sweep(name); err != nil {
				c.unreadable(name, err)
			}
		}
		return
	}
	if d.Orphans.Has(name) {
		return // its entry was dropped during the scan, and its bytes are booked
	}
	h, info, err := pieceformat.Header{}, staging.Info{}, error(nil)
	if !c.late {
		h, info, err = d.Look(name)
	}
	if cond := health.Judge(err); c.late || err != nil && cond != health.Other && cond != health.Unanswered {
		h, info, err = d.By(d.Health.Bare()).Look(name) // again without the monitor, so that the error of a device is not counted twice
	}
	if err == nil {
		c.identify(name, rel, &h, pieceformat.Padded(info.Allocated))
	} else {
		r.judge.Unsound(c, name, rel, info, err)
	}
}

func (c *scan) skipped(rel string, err error) {
	if errors.Is(err, fs.ErrNotExist) || c.lacks(err) {
		return
	}
	if errors.Is(err, staging.ErrForeign) {
		c.by.count.Foreign.Add(1)
		c.by.kept.Log.Error("another root is in this one and is left alone: its bytes are not counted; move one of them away",
			"directory", rel)
		return
	}
	c.miss(rel+"/", 0)
	if !c.late {
		c.by.incomplete.Store(true)
		c.by.kept.Log.Warn("a directory could not be read; its files are not counted until it can be",
			"directory", rel, "error", err)
	}
}

// miss records a file or directory that could not be read.
func (c *scan) miss(rel string, bytes int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.missed[rel] = bytes
}

// lacks records an error if it means that the process is short of a resource, and reports whether it does.
func (c *scan) lacks(err error) bool {
	if health.Judge(err) != health.Shortage {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.short = err
	return true
}

// unreadable leaves out a file that cannot be read at present, and books its bytes.
func (c *scan) unreadable(name string, err error) {
	if errors.Is(err, fs.ErrNotExist) || c.lacks(err) {
		return
	}
	d, bytes := c.by.kept, int64(0)
	if !c.late {
		if info, err := d.FS.Stat(name); err == nil {
			bytes = pieceformat.Padded(info.Allocated)
		}
		d.Log.Warn("a file could not be read; it is left out until it can be", "file", name, "error", err)
		c.Overlook(bytes)
		c.by.incomplete.Store(true)
	}
	c.miss(strings.TrimPrefix(name, d.Slash), bytes)
}

// miss takes over the unreadable files of a scan that has ended.
func (r *recovery) miss(c *scan) {
	r.set.Lock()
	defer r.set.Unlock()
	r.missed = c.missed
}

// met removes a file or directory from the unreadable ones after it has been read, and adds the parts of it that are still
// unreadable. It returns false if another scan has begun since.
func (r *recovery) met(rel string, but map[string]int64) bool {
	r.set.Lock()
	defer r.set.Unlock()
	bytes, is := r.missed[rel]
	if !is {
		return false
	}
	delete(r.missed, rel)
	maps.Copy(r.missed, but)
	r.set.Account.Remove(capacity.Orphans, bytes)
	if r.overlooked != nil {
		*r.overlooked -= bytes
	}
	return true
}

// lateLooks is the maximum number of files and directories that one call of again examines.
const lateLooks = 16

// again examines some of the files that the scan could not read. It is a part of the root's upkeep.
func (r *recovery) again(ctx context.Context) {
	s := r.set
	s.Lock()
	looks := make([]string, 0, lateLooks)
	for rel := range r.missed { // in any order
		if looks = append(looks, rel); len(looks) == lateLooks {
			break
		}
	}
	s.Unlock()
	if len(looks) == 0 || s.IsScanning() || r.kept.loadNamespaces() != nil {
		return
	}
	found := 0
	for _, rel := range looks {
		c := r.newScan(true)
		c.revisit(ctx, rel)
		if _, still := c.missed[rel]; !still && c.short == nil && ctx.Err() == nil && r.met(rel, c.missed) {
			found++
		}
	}
	if found == 0 {
		return
	}
	s.Lock()
	defer s.Unlock()
	s.Index.Each(func(slot uint32, e *index.Entry) {
		if !e.Any(index.Announced | index.Evicting | index.Detached | index.Moving) {
			s.Index.TouchEntry(e)
			s.Evictor.Announce(abi.OpResident, slot, s.Index.Fingerprint(slot), 0)
		}
	})
}

// revisit examines a file, or all files in a directory.
func (c *scan) revisit(ctx context.Context, rel string) {
	dir, whole := strings.CutSuffix(rel, "/")
	if !whole {
		c.look(rel)
		return
	}
	d := c.by.kept.By(c.by.kept.Health.Bare())
	if err := d.Walk(ctx, rel, c.by.root.store.cfg.ScanWorkers, c.file, c.skipped); err != nil {
		c.skipped(dir, err)
	}
}

// identify enters a valid piece in the index. The header identifies the piece, and the walk gives its name.
func (c *scan) identify(name, rel string, h *pieceformat.Header, allocated int64) {
	r, d := c.by, c.by.kept
	cl, err := d.Catalog.ClassFor(h)
	var given string
	if err == nil {
		given, err = nameAt(cl, h, rel)
	}
	if err != nil {
		r.judge.Unknown(c, name, allocated, err)
		return
	}
	r.judge.Found(c, rel, given, cl, h, allocated)
}

// nameAt returns the name under which an entry records a piece at a path. It is empty for the built-in name.
func nameAt(cl *catalog.Class, h *pieceformat.Header, rel string) (name string, err error) {
	var room [2 * pieceformat.MaxPath]byte
	if string(cl.AppendBuiltin(room[:0], &h.Key, h.Rank)) == rel {
		return "", nil
	}
	if err = pieceformat.CheckName(rel); err == nil && pieceformat.Reserved([]byte(rel)) {
		err = pieceformat.ErrWrongPiece
	}
	if err != nil {
		return "", fmt.Errorf("%w: %w", catalog.ErrAlien, err)
	}
	return rel, nil
}

// settle checks files that may have been removed together with an entry during the scan, or that could not be unlinked then.
func (c *scan) settle(unsure []entries.MarkedPiece) {
	s, d := c.by.set, c.by.kept
	for _, p := range unsure {
		s.Lock()
		stands := s.Stands(p.Mark)
		var v entries.Eviction
		if stands {
			v = entries.Eviction{Class: s.ClassOf(p.Slot), Key: s.Index.Key(p.Slot), Names: s.Index.NamesOf(p.Slot)}
		}
		s.Unlock()
		if !stands {
			continue
		}
		name := d.Slash + v.Name(p.Rank)
		if _, err := d.FS.Stat(name); errors.Is(err, fs.ErrNotExist) || d.Orphans.Has(name) {
			c.by.root.drop(p.Mark)
		}
	}
}

// order sets the last touch of entries that the scan found and that were not touched since, in the order of their store times.
func (c *scan) order() {
	s, newest := c.by.set, int64(0)
	var list []uint32
	s.Lock()
	s.Index.Each(func(slot uint32, e *index.Entry) {
		if e.LastTouch() == 0 {
			newest = max(newest, c.Stored(slot))
			list = append(list, slot)
		}
	})
	s.Unlock()
	slices.SortFunc(list, func(a, b uint32) int { return cmp.Or(cmp.Compare(c.Stored(a), c.Stored(b)), cmp.Compare(a, b)) })
	s.Lock()
	for i, slot := range list {
		if e := s.Index.At(slot); e.Is(index.Live) && e.LastTouch() == 0 {
			e.SetLastTouch(uint32(i + 1))
		}
	}
	s.Index.AdvanceClock(uint32(len(list)))
	s.Unlock()
	c.by.kept.Sequence.StampsFrom(newest)
}

// End replaces the upper bound by the exact account and tells the evict policy about all entries. If the store is closed before
// the policy knows all entries, the scan has not ended. Otherwise the state of the policy would be saved, and the missing
// entries would never be victims. ended is called with the lock held and gets the bytes that were booked as orphans.
func (c *scan) End(ctx context.Context, ended func(booked int64)) {
	s := c.by.set
	c.by.kept.Quarantine.Recount()
	s.Lock()
	booked := c.Orphaned()
	s.Account.Add(capacity.Orphans, booked)
	s.Account.Remove(capacity.Unscanned, math.MaxInt64)
	s.Unlock()
	_ = s.Evictor.EndScan(ctx, func() { // it fails only if the store is closed
		ended(booked)
		s.EndScan()
	})
}

func (r *recovery) sweep(name string) error {
	if err := r.kept.FS.Remove(name); err != nil {
		return err
	}
	r.count.Swept.Add(1)
	return nil
}
