package recovery

import (
	"errors"
	"io/fs"
	"math/bits"

	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/store/catalog"
	"github.com/kvhost/kvhost/host/store/entries"
	"github.com/kvhost/kvhost/host/store/index"
	"github.com/kvhost/kvhost/host/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
	"golang.org/x/sys/unix"
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

// Rename implements [Judge]. Where the place policy has no name for the piece, or one that something else has, it gets the
// built-in one, as in a put.
func (j Exclusive) Rename(
	c *Scan, from string, cl *catalog.Class, h *pieceformat.Header, allocated int64,
) (to string, fallback, ok bool) {
	d := c.root.Kept
	var err error
	for _, fallback = range [...]bool{cl.Place.Policy.Quarantined(), true} {
		if to, err = d.PathOf(cl, &h.Key, h.Rank, fallback); err != nil {
			continue
		}
		if to == from { // a policy that changes its names
			return to, fallback, true
		}
		err = d.Move(from, to)
		stands := err != nil && isPiece(d, to, cl, h)
		if stands {
			if _, gone := d.FS.Stat(from); errors.Is(gone, fs.ErrNotExist) {
				err = nil // it happened all the same
			}
		}
		if err == nil {
			c.root.Count.Renamed.Add(1)
			return to, fallback, true
		}
		if stands || !taken(err) {
			break
		}
	}
	switch {
	case !taken(err):
		c.Unreadable(from, err)
	case c.root.sameFile(from, to): // another name of a piece, whose bytes are counted once
		d.Discard(from, 0)
	default:
		c.root.unclaimed(from, err)
	}
	return "", false, false
}

// taken says of an error of [files.Dir.Move] that something else has the name, or stands on the way to it.
func taken(err error) bool { return errors.Is(err, fs.ErrExist) || errors.Is(err, unix.ENOTDIR) }

// isPiece says whether the file with a name is the piece of a header.
func isPiece(d *Directory, name string, cl *catalog.Class, h *pieceformat.Header) bool {
	there, _, err := d.Look(name)
	return err == nil && cl.IsPiece(&there, &h.Key, h.Rank)
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
	d, cl := c.root.Kept, found.Class
	builtin, err := d.PathOf(cl, &h.Key, h.Rank, true)
	opened := ""
	if err == nil {
		opened, err = d.Locate(cl, &h.Key, h.Rank, true)
	}
	fallback, ok := opened == builtin, true
	switch {
	case err != nil:
		c.Unreadable(name, err)
	case opened != name && (found.Twice || isPiece(d, opened, cl, h)): // the scan comes to that one, or has
		d.Discard(name, allocated)
	case found.Twice: // it was met twice, as when a put took it in before the scan came to it
		if found.FallbackName && !fallback && isPiece(d, builtin, cl, h) {
			d.Discard(builtin, allocated)
			rebook(c, cl, h)
		}
	default:
		if opened != name {
			_, fallback, ok = j.Rename(c, name, cl, h, allocated)
		}
		if ok {
			c.Add(cl, h, allocated, fallback)
		}
	}
}

// rebook gives the entry of a header the bytes of the files that loads open. Of a piece that was there twice nobody noted
// which file was booked, and one that is compressed takes less.
func rebook(c *Scan, cl *catalog.Class, h *pieceformat.Header) {
	s, d := c.root.Entries, c.root.Kept
	fp := chunk.Fingerprint(h.Namespace, h.Group, h.Key)
	s.Lock()
	slot := s.Index.Find(fp, cl.Base, &h.Key)
	if slot == index.None {
		s.Unlock()
		return
	}
	pieces, fallback := s.Index.Pieces(slot), s.Index.At(slot).Is(index.FallbackName)
	s.Unlock()
	bytes := int64(0)
	for rank := range entries.Ranks(pieces) {
		name, err := d.Locate(cl, &h.Key, rank, fallback)
		var info staging.Info
		if err == nil {
			info, err = d.FS.Stat(name)
		}
		if err != nil {
			c.Unreadable(name, err)
			return
		}
		bytes += pieceformat.Padded(info.Allocated)
	}
	s.Lock()
	defer s.Unlock()
	if s.Stands(entries.Mark{Slot: slot, Fingerprint: fp}) && s.Index.Pieces(slot) == pieces {
		entries.Rebook(s, slot, bytes+int64(bits.OnesCount64(s.Index.Reserved(slot)&^pieces))*h.MostBytes())
	}
}
