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

// scanJudge says what becomes of the files that a scan meets. Its methods are called on several goroutines.
type scanJudge interface {
	// Found enters a piece, given its path below the root and its name: that path, or empty for the built-in one.
	Found(c *scan, rel, name string, cl *catalog.Class, h *pieceformat.Header, allocated int64)
	// Unsound judges a file that is no sound piece.
	Unsound(c *scan, name, rel string, info staging.Info, err error)
	// Unknown judges a piece of a namespace that the store does not know, or under a name that no piece can have.
	Unknown(c *scan, name string, allocated int64, err error)
}

// scan is one look at every file of a root.
type scan struct {
	*entries.Scan
	by   *recovery
	late bool // after the scan

	mu     sync.Mutex
	short  error            // the process was short of something: the scan is begun again
	missed map[string]int64 // what could not be read, by path below the root, directories with a slash: the bytes booked for it
}

// newScan begins a scan, or a look after the scan.
func (r *recovery) newScan(late bool) *scan {
	return &scan{Scan: entries.NewScan(r.set, late), by: r, late: late, missed: map[string]int64{}}
}

// beginScan makes the root ready to be used while it is scanned. What is in use on the file system is an upper bound of
// the bytes that the scan will find.
func (r *recovery) beginScan() error {
	d := r.kept
	if _, err := d.FS.ReadDir(d.Path); err != nil {
		return err
	}
	// What is found counts as stored. Who wrote it may have been killed before it was durable.
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
	r.current.Store(r.newScan(false)) // before the first put, which looks for its file itself
	return nil
}

// scan scans until everything was seen once, after beginScan.
func (r *recovery) scan(ctx context.Context) error {
	start, c := r.root.store.cfg.Now(), r.current.Load()
	err := c.walk(ctx)
	if err == nil && !r.kept.Health.Serves() {
		err = r.kept.Health.OutError() // half a scan is no account of what is there
	}
	if err != nil {
		r.current.Store(r.newScan(false)) // of the next attempt
		return err
	}
	r.current.Store(nil)
	c.settle(c.Close())
	c.order()
	r.miss(c)
	c.End(ctx, func(int64) {})
	r.makeRoom()
	if files := r.count.Scanned.Load(); files > 0 { // after a kill, most of the time
		r.kept.Log.Info("scanned", "files", files, "took", r.root.store.cfg.Now().Sub(start))
	}
	return nil
}

// makeRoom is for a root that a scan finds over its limit. Damaged files go, and entries that lack pieces, for which bytes
// are reserved: else entries that are hits would pay for them.
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
		r.root.drop(m, 0)
	}
}

// walk looks at every file.
func (c *scan) walk(ctx context.Context) error {
	d := c.by.kept
	if c.by.from != nil {
		return c.list(ctx, c.by.from)
	}
	return errors.Join(d.Walk(ctx, "", c.by.root.store.cfg.ScanWorkers, c.file, c.skipped), c.short)
}

// file judges one file. rel is its path below the root.
func (c *scan) file(rel string, is files.FileKind) {
	if c.by.count.Scanned.Add(1); is == files.Foreign {
		c.by.count.Foreign.Add(1)
		return
	}
	c.look(rel)
}

// look judges a file by its name and its header.
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
		return // its entry was dropped during the scan, and it is counted
	}
	h, info, err := pieceformat.Header{}, staging.Info{}, error(nil)
	if !c.late {
		h, info, err = d.Look(name)
	}
	if cond := health.Judge(err); c.late || err != nil && cond != health.Other && cond != health.Unanswered {
		h, info, err = d.By(d.Health.Bare()).Look(name) // once more, without a second error of the device
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
		c.by.kept.Log.Error("another root is in this one and is left alone: what it takes is not counted; move one of them away",
			"directory", rel)
		return
	}
	c.miss(rel+"/", 0)
	if !c.late {
		c.by.incomplete.Store(true)
		c.by.kept.Log.Warn("a directory could not be read; what it holds is not counted until it can be",
			"directory", rel, "error", err)
	}
}

// miss notes what could not be read.
func (c *scan) miss(rel string, bytes int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.missed[rel] = bytes
}

// lacks notes an error that says that the process is short of something.
func (c *scan) lacks(err error) bool {
	if health.Judge(err) != health.Shortage {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.short = err
	return true
}

// unreadable leaves a file alone that could not be read just now.
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

// miss keeps what a scan that has ended could not read.
func (r *recovery) miss(c *scan) {
	r.set.Lock()
	defer r.set.Unlock()
	r.missed = c.missed
}

// met ends that something could not be read, but perhaps some of what is in it. It is false if another scan has begun since.
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

// lateLooks is how many files and directories again looks at.
const lateLooks = 16

// again looks at some of what the scan could not read, as a part of the root's upkeep.
func (r *recovery) again(ctx context.Context) {
	s := r.set
	s.Lock()
	looks := make([]string, 0, lateLooks)
	for rel := range r.missed { // any of them
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

// revisit looks at a file, or at all that is in a directory.
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

// identify takes a sound piece into the index: the header says what it is, and the walk how it is named.
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

// nameAt is a piece's name as its entry has it, by where it stands: empty for the built-in one.
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

// settle looks again for files that may have gone with an entry that was removed during the scan, or could not be
// unlinked then.
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
			c.by.root.drop(p.Mark, 0)
		}
	}
}

// order gives what the scan found, and was not touched since, its last touch: by the time of storing.
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

// End replaces the bound by the account and tells the evict policy what is here. When the store is closed before all
// is told, the scan has not ended: else the policy's state would be kept, and what it lacks would never be a victim.
// ended is called with the lock held, and gets the bytes that were booked as orphans.
func (c *scan) End(ctx context.Context, ended func(booked int64)) {
	s := c.by.set
	c.by.kept.Quarantine.Recount()
	s.Lock()
	booked := c.Orphaned()
	s.Account.Add(capacity.Orphans, booked)
	s.Account.Remove(capacity.Unscanned, math.MaxInt64)
	s.Unlock()
	_ = s.Evictor.EndScan(ctx, func() { // what fails is the store being closed
		ended(booked)
		s.EndScan()
	})
}
