package store

import (
	"errors"
	"io/fs"

	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/files"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
)

// ownJudge is the [scanJudge] of a root that one host has for itself: what is of no use is moved or removed.
type ownJudge struct{}

// Found implements [scanJudge].
func (j ownJudge) Found(c *scan, rel, name string, cl *catalog.Class, h *pieceformat.Header, allocated int64) {
	if twice := c.Add(cl, h, name, allocated); twice.Other != "" {
		j.choose(c, twice, rel, name, cl, h, allocated)
	}
}

// choose ends a conflict: a piece is there twice, as after a power failure that has undone an unlinking, or where a policy
// has named it twice. The file goes that stands under another name than its header has, or else the one that was met last.
func (j ownJudge) choose(
	c *scan, twice entries.Twice, rel, given string, cl *catalog.Class, h *pieceformat.Header, allocated int64,
) {
	d := c.by.kept
	name, other := d.Slash+rel, d.Slash+twice.Other
	there, info, err := d.Look(other)
	switch {
	case err == nil && cl.IsPiece(&there, &h.Key, h.Rank):
		if was, _ := nameAt(cl, h, twice.Other); h.Name == given && there.Name != was &&
			j.rename(c, twice.Mark, given, h.Rank, allocated-pieceformat.Padded(info.Allocated), true) {
			name = other
		}
		d.Discard(name, allocated)
		return
	case err != nil && pieceformat.IsDamage(err):
		d.Quarantine.Isolate(other, err)
	case err != nil && !errors.Is(err, fs.ErrNotExist) && !files.Misled(err):
		c.unreadable(name, err)
		return
	}
	j.rename(c, twice.Mark, given, h.Rank, 0, false)
}

// rename gives a piece of an entry another name and so many more bytes; with unused only if nothing uses the entry.
func (ownJudge) rename(c *scan, of entries.Mark, name string, rank uint32, more int64, unused bool) bool {
	s := c.by.set
	s.Lock()
	defer s.Unlock()
	if !s.Stands(of) || s.Index.Pieces(of.Slot)&(1<<rank) == 0 || unused && (s.Busy(of.Slot) || s.Index.At(of.Slot).Pins() > 0) {
		return false
	}
	s.Index.Rename(of.Slot, rank, name)
	entries.Rebook(s, of.Slot, s.Index.Bytes(of.Slot)+more)
	return true
}

// Unsound implements [scanJudge]. A file that is no piece is the store's by its built-in name, or because a piece's first page
// is written last: after a power failure it may hold zeros.
func (j ownJudge) Unsound(c *scan, name, rel string, info staging.Info, err error) {
	d := c.by.kept
	switch {
	case errors.Is(err, pieceformat.ErrNotPiece) || errors.Is(err, pieceformat.ErrDamaged) && info.Size < pieceformat.Page:
		if !pieceformat.IsBuiltin([]byte(rel)) && !d.Blank(name) {
			c.by.count.Foreign.Add(1)
			return
		}
		d.Quarantine.Isolate(name, err)
	case pieceformat.IsDamage(err):
		d.Quarantine.Isolate(name, err)
	default:
		c.unreadable(name, err)
	}
}

// Unknown implements [scanJudge]. A file that will never have a class, because there is no text of its namespace or because
// it cannot be of it, is moved away.
func (j ownJudge) Unknown(c *scan, name string, _ int64, err error) {
	if !errors.Is(err, catalog.ErrUnknownNamespace) && !errors.Is(err, catalog.ErrAlien) {
		c.unreadable(name, err)
		return
	}
	c.by.count.Unclaimed.Add(1)
	c.by.kept.Quarantine.Isolate(name, err)
}
