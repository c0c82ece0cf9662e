package recovery

import (
	"errors"
	"io/fs"

	"github.com/kvhost/kvhost/host/store/catalog"
	"github.com/kvhost/kvhost/host/store/entries"
	"github.com/kvhost/kvhost/host/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
)

// Exclusive is the [Judge] of a root that one host has for itself: what is of no use is moved or removed.
type Exclusive struct{}

// Found implements [Judge].
func (j Exclusive) Found(
	c *Scan, name string, cl *catalog.Class, h *pieceformat.Header, allocated int64, fallback bool,
) {
	if found := c.Add(cl, h, allocated, fallback); found.Class != nil {
		j.resolve(c, found, name, h, allocated)
	}
}

// Unsound implements [Judge].
func (j Exclusive) Unsound(c *Scan, name, rel string, info staging.Info, err error) {
	d := c.root.Kept
	switch {
	case errors.Is(err, pieceformat.ErrNotPiece) || errors.Is(err, pieceformat.ErrDamaged) && info.Size < pieceformat.Page:
		claimed := d.Catalog.Claims(rel)
		if !claimed { // its namespace may have no piece that was met, or none before another root's scan met one just now
			d.Catalog.RegisterAll()
			claimed = d.Catalog.Claims(rel)
		}
		if !claimed {
			c.root.Count.Foreign.Add(1)
			return
		}
		d.Quarantine.Isolate(name, err)
	case pieceformat.IsDamage(err):
		d.Quarantine.Isolate(name, err)
	default:
		c.Unreadable(name, err)
	}
}

// Unknown implements [Judge]. A file that will never have a class, because there is no text of its namespace or because
// it cannot be of it, is moved away.
func (j Exclusive) Unknown(c *Scan, name string, _ int64, err error) {
	if !errors.Is(err, catalog.ErrUnknownNamespace) && !errors.Is(err, catalog.ErrAlien) {
		c.Unreadable(name, err)
		return
	}
	c.root.unclaimed(name, err)
}

// Rename implements [Judge].
func (j Exclusive) Rename(c *Scan, from, to string, _ int64) bool {
	err := c.root.move(from, to)
	switch {
	case err == nil:
		return true
	case errors.Is(err, fs.ErrExist):
		if c.root.sameFile(from, to) { // another name of a piece, whose bytes are counted once
			c.root.Kept.Discard(from, 0)
			break
		}
		c.root.unclaimed(from, err)
	default:
		c.Unreadable(from, err)
	}
	return false
}

func (r *Root) move(from, to string) error {
	err := r.Kept.Move(from, to)
	if err == nil {
		r.Count.Renamed.Add(1)
	}
	return err
}

func (r *Root) sameFile(a, b string) bool {
	one, err := r.Kept.FS.Stat(a)
	if err != nil || one.Links < 2 {
		return false
	}
	other, err := r.Kept.FS.Stat(b)
	return err == nil && one.Same(other)
}

func (r *Root) unclaimed(name string, cause error) {
	r.Count.Unclaimed.Add(1)
	r.Kept.Quarantine.Isolate(name, cause)
}

// resolve ends a conflict. A piece that another place policy named than its entry's is moved to where the entry looks
// for it. Of a piece that is there twice, as after a power failure that has undone an unlinking, the file goes that no
// load would open.
func (j Exclusive) resolve(c *Scan, found entries.Conflict, name string, h *pieceformat.Header, allocated int64) {
	d := c.root.Kept
	builtin, err := d.PathOf(found.Class, &h.Key, h.Rank, true)
	if err != nil {
		c.Unreadable(name, err)
		return
	}
	if found.Twice {
		opened, err := d.Locate(found.Class, &h.Key, h.Rank, true)
		switch {
		case err != nil:
			c.Unreadable(name, err)
		case opened != name:
			d.Discard(name, allocated)
		// else it was met twice, as when a put took it in before the scan came to it
		case found.FallbackName && builtin != name:
			if o, _, err := d.Look(builtin); err == nil && found.Class.IsPiece(&o, &h.Key, h.Rank) {
				d.Discard(builtin, allocated)
			}
		}
		return
	}
	fallback := name == builtin
	if placed, err := d.PathOf(found.Class, &h.Key, h.Rank, false); err == nil && name != placed && !fallback {
		if err := c.root.move(name, placed); errors.Is(err, fs.ErrExist) {
			d.Discard(name, allocated) // the scan comes to that one, or has
			return
		} else if err != nil {
			c.root.unclaimed(name, err)
			return
		}
	} else if err != nil && !fallback {
		c.Unreadable(name, err)
		return
	}
	c.Add(found.Class, h, allocated, fallback)
}
