package store

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/kvhost/kvhost/host/store/catalog"
	"github.com/kvhost/kvhost/host/store/entries"
	"github.com/kvhost/kvhost/host/store/files"
	"github.com/kvhost/kvhost/host/store/pieceformat"
	"github.com/kvhost/kvhost/host/store/recovery"
	"github.com/kvhost/kvhost/staging"
)

// recover finds what a root holds. Where a checkpoint tells, it is done with that. Otherwise a scan is due, and until
// it has ended, the root serves what it has seen.
func (r *root) recover(ctx context.Context) error {
	if err := r.Quarantine.Load(); err != nil {
		return err
	}
	return r.custody.recover(ctx)
}

// start does so for a root that this host has for itself.
func (r ownScan) start(ctx context.Context) error {
	state, ok, err := savedIndex{r.root}.takeCheckpoint()
	if err != nil {
		return err
	}
	if !ok {
		return r.begin()
	}
	r.Lock()
	r.Evictor.Resume(ctx, state)
	r.Unlock()
	r.shrink(ctx)
	close(r.scanned)
	return ctx.Err()
}

// scanState judges the files of a scan. Its methods run on several goroutines.
type scanState struct {
	*entries.Scan
	root *root
}

func newScan(r *root) *scanState { return &scanState{entries.NewScan(&r.Set), r} }

// file judges one file. rel is its path below the root.
func (c *scanState) file(rel string, e fs.DirEntry) {
	r := c.root
	r.count.scanned.Add(1)
	name := r.Path + "/" + rel
	if temp, ok := pieceformat.ParseTemp(filepath.Base(rel)); ok {
		if r.store.seq.Wrote(temp) {
			return
		}
		if r.custody.ownsTemp(temp.Host) {
			if err := r.sweep(name); err != nil {
				c.unreadable(name, err)
			}
		}
		return
	}
	if !e.Type().IsRegular() || filepath.Base(rel)[0] == '.' {
		r.Counted(&r.count.foreign)
		return
	}
	if r.Orphans.Has(name) {
		return // an entry was dropped meanwhile, and it is counted
	}
	f, err := r.FS.OpenFile(name, os.O_RDONLY, 0)
	if err != nil {
		c.unreadable(name, err)
		return
	}
	h, info, err := files.Inspect(f)
	f.Close()
	if err == nil {
		c.identify(name, rel, &h, pieceformat.Padded(info.Allocated))
	} else {
		r.custody.foundUnsound(c, name, rel, info, err)
	}
}

// unsound judges a file that is no sound piece.
func (c *scanState) unsound(name, rel string, info staging.Info, err error) {
	r := c.root
	switch {
	case errors.Is(err, pieceformat.ErrNotPiece) || errors.Is(err, pieceformat.ErrDamaged) && info.Size < pieceformat.Page:
		if !r.store.catalog.Claims(rel) && !(r.store.catalog.RegisterAll() && r.store.catalog.Claims(rel)) {
			r.Counted(&r.count.foreign)
			return
		}
		r.Quarantine.Isolate(name, err)
	case pieceformat.IsDamage(err):
		r.Quarantine.Isolate(name, err)
	default:
		c.unreadable(name, err)
	}
}

func (c *scanState) skipped(rel string, err error) {
	c.root.Lock()
	c.root.scanIncomplete = true
	c.root.Unlock()
	c.root.Log.Warn("a directory could not be read; what it holds is not counted", "directory", rel, "error", err)
}

// unreadable leaves a file alone that could not be read just now.
func (c *scanState) unreadable(name string, err error) {
	r := c.root
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	r.Log.Warn("a file could not be read; it is left out until the next start", "file", name, "error", err)
	n := int64(0)
	if info, err := r.FS.Stat(name); err == nil {
		n = pieceformat.Padded(info.Allocated)
	}
	c.Overlook(n)
	r.Lock()
	r.scanIncomplete = true
	r.Unlock()
}

func (r *root) sweep(name string) error {
	if err := r.FS.Remove(name); err != nil {
		return err
	}
	r.Counted(&r.count.swept)
	return nil
}

// identify takes a sound piece into the index if a name leads to it: the place policy's, or the built-in one. A piece
// that an earlier place policy named is moved to the name that it has now.
func (c *scanState) identify(name, rel string, h *pieceformat.Header, allocated int64) {
	r := c.root
	cl, err := r.store.catalog.ClassFor(h)
	if err != nil {
		r.custody.foundUnknown(c, name, allocated, err)
		return
	}
	id, err := recovery.Identify(r.store.catalog, cl, h, rel)
	if err != nil {
		c.unreadable(name, err)
		return
	}
	defer id.Release()
	if id.Rename != "" && !r.custody.rename(c, name, r.Path+"/"+id.Rename, allocated) {
		return
	}
	r.custody.found(c, name, id.Class, h, allocated, id.FallbackName)
}

// resolve ends a clash. A piece that another naming named than its entry's is moved to where the entry looks for it. Of
// a piece that is there twice, as after a power failure that has undone an unlinking, the file goes that no load would
// open.
func (c *scanState) resolve(was entries.Conflict, name string, h *pieceformat.Header, allocated int64) {
	r := c.root
	builtin, err := r.PathOf(was.Class, &h.Key, h.Rank, true)
	if err != nil {
		c.unreadable(name, err)
		return
	}
	if was.Twice {
		opened, err := r.Locate(was.Class, &h.Key, h.Rank, true)
		switch {
		case err != nil:
			c.unreadable(name, err)
		case opened != name:
			r.Discard(name, allocated)
		case was.FallbackName && builtin != name: // else it was met twice, as when a put took it in before the scan came to it
			if o, _, err := r.Look(builtin); err == nil && was.Class.IsPiece(&o, &h.Key, h.Rank) {
				r.Discard(builtin, allocated)
			}
		}
		return
	}
	fallback := name == builtin
	if placed, err := r.PathOf(was.Class, &h.Key, h.Rank, false); err == nil && name != placed && !fallback {
		if err := r.move(name, placed); errors.Is(err, fs.ErrExist) {
			r.Discard(name, allocated) // the scan comes to that one, or has
			return
		} else if err != nil {
			r.Counted(&r.count.unclaimed)
			r.Quarantine.Isolate(name, err)
			return
		}
	} else if err != nil && !fallback {
		c.unreadable(name, err)
		return
	}
	c.Add(was.Class, h, allocated, fallback)
}

func (r *root) move(from, to string) error {
	err := r.Move(from, to)
	if err == nil {
		r.Counted(&r.count.renamed)
	}
	return err
}

// nobodys says, of classFor's error, that a file will never have a class: there is no text of its namespace, or it
// cannot be of it.
func nobodys(err error) bool {
	return errors.Is(err, ErrUnknownNamespace) || errors.Is(err, catalog.ErrAlien)
}
