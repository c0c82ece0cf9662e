package recovery

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"sync/atomic"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/store/catalog"
	"github.com/kvhost/kvhost/host/store/entries"
	"github.com/kvhost/kvhost/host/store/evictor"
	"github.com/kvhost/kvhost/host/store/index"
	"github.com/kvhost/kvhost/host/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
	"golang.org/x/sys/unix"
)

// The index keeps no paths: it relies on the place policy to repeat them. When a policy is in quarantine, its pieces
// get the built-in names, so that nobody depends on it any more. The headers of the files say which piece is where.

// renaming is one look at the files of a root for pieces that a place policy named.
type renaming struct {
	root    *Root
	from    *catalog.PlaceGeneration
	renamed atomic.Int64
	skipped atomic.Bool // something could not be read or moved
	damaged atomic.Bool // nobody knows of a file which piece it was
}

// Misplaced looks for a piece that does not stand where its place policy says. Such a policy is disqualified.
func (r *Root) Misplaced(ctx context.Context, g *catalog.PlaceGeneration) error {
	w := &renaming{root: r, from: g}
	return w.walk(ctx, func(rel string, h *pieceformat.Header, cl *catalog.Class) {
		if _, ok := w.find(h, cl); ok && !g.Policy.Quarantined() && w.onlyAt(rel, h, cl) {
			_ = r.Kept.Catalog.Paths.Verify(g, cl, &h.Key, h.Rank, rel) // what it says of itself goes into the log
		}
	})
}

// onlyAt says whether a file with another name than the policy's proves anything against the policy. It does not where
// the store chose the built-in name, because the policy's was taken, nor where it is a second file of a piece that also
// stands where the policy says.
func (w *renaming) onlyAt(rel string, h *pieceformat.Header, cl *catalog.Class) bool {
	d := w.root.Kept
	if builtin, err := d.PathOf(cl, &h.Key, h.Rank, true); err != nil || builtin == d.Slash+rel {
		return false
	}
	said, err := d.PathOf(cl, &h.Key, h.Rank, false)
	if err != nil || said == d.Slash+rel {
		return false
	}
	there, _, err := d.Look(said)
	return err != nil || !cl.IsPiece(&there, &h.Key, h.Rank)
}

// RenamePieces gives the pieces that a place policy named their built-in names, beside the work of all others. left is
// how many of its entries may still have pieces under its names: those that were being written, and those whose files
// could not be read or moved. Entries without a file are dropped.
func (r *Root) RenamePieces(ctx context.Context, g *catalog.PlaceGeneration) (renamed int64, left int, err error) {
	w := &renaming{root: r, from: g}
	before := r.named(g)
	if err = w.walk(ctx, w.rename); err != nil {
		return w.renamed.Load(), len(before), err
	}
	for m, written := range r.named(g) {
		// A piece that was written meanwhile may stand where the walk had been.
		if w.skipped.Load() || !written || !before[m] || !r.giveUp(m) {
			left++
			continue
		}
		r.Drop(m)
	}
	return w.renamed.Load(), left, nil
}

// named are the entries of a place policy that may have pieces under its names, and whether nothing more is being
// written of them.
func (r *Root) named(g *catalog.PlaceGeneration) map[entries.Mark]bool {
	s := r.Entries
	list := map[entries.Mark]bool{}
	s.Lock()
	defer s.Unlock()
	s.Index.Each(func(slot uint32, e *index.Entry) {
		if !e.Any(index.Evicting|index.FallbackName) && s.ClassOf(slot).Place == g {
			list[entries.Mark{Slot: slot, Fingerprint: s.Index.Fingerprint(slot)}] = !s.Busy(slot)
		}
	})
	return list
}

// Named says whether there are such entries.
func (r *Root) Named(g *catalog.PlaceGeneration) bool { return len(r.named(g)) > 0 }

// giveUp marks an entry whose files were not found, so that nobody asks the policy for them. It is false for one that
// is being written.
func (r *Root) giveUp(m entries.Mark) bool {
	s := r.Entries
	s.Lock()
	defer s.Unlock()
	if s.Busy(m.Slot) || s.Index.At(m.Slot).Pins() > 0 {
		return false
	}
	if s.Stands(m) {
		s.Index.At(m.Slot).Set(index.FallbackName)
	}
	return true
}

// walk visits the sound pieces below the root that are no orphans, and finds orphans without a name.
func (w *renaming) walk(ctx context.Context, visit func(rel string, h *pieceformat.Header, cl *catalog.Class)) error {
	d := w.root.Kept
	d.Orphans.Seek()
	err := staging.Walk(ctx, d.FS, d.Path, 1, func(rel string, e fs.DirEntry) {
		if _, temp := pieceformat.ParseTemp(filepath.Base(rel)); temp || !e.Type().IsRegular() ||
			filepath.Base(rel)[0] == '.' ||
			d.Orphans.Has(d.Slash+rel) {
			return
		}
		h, _, err := d.Look(d.Slash + rel)
		if err != nil {
			if pieceformat.IsDamage(err) {
				w.damaged.Store(true)
			} else if !errors.Is(err, fs.ErrNotExist) {
				w.skipped.Store(true)
			}
			return
		}
		if d.Orphans.Met(d.Slash+rel, &h) {
			return
		}
		if cl, err := d.Catalog.ClassFor(&h); err == nil {
			visit(rel, &h, cl)
		}
	}, func(string, error) { w.skipped.Store(true) })
	if err == nil && !w.skipped.Load() && !w.damaged.Load() {
		d.Orphans.Sought()
	}
	d.Orphans.Retry(ctx)
	return err
}

// find returns the entry of a piece if the place policy named it. The slot is none when the piece has no entry.
func (w *renaming) find(h *pieceformat.Header, cl *catalog.Class) (m entries.Mark, ok bool) {
	s := w.root.Entries
	m.Fingerprint = chunk.Fingerprint(cl.Namespace.Digest, cl.Group, h.Key)
	s.Lock()
	defer s.Unlock()
	m.Slot = s.Index.Find(m.Fingerprint, cl.Base, &h.Key)
	return m, m.Slot != index.None && s.Stands(m) && s.Index.Pieces(m.Slot)&(1<<h.Rank) != 0 &&
		s.ClassOf(m.Slot).Place == w.from
}

// rename moves one piece to its built-in name. The entry is pinned meanwhile, so that nobody evicts it, and marked
// before: who does not find the file under the policy's name then looks for it under the built-in one.
func (w *renaming) rename(rel string, h *pieceformat.Header, cl *catalog.Class) {
	r, d, s := w.root, w.root.Kept, w.root.Entries
	builtin, err := d.PathOf(cl, &h.Key, h.Rank, true)
	name := d.Slash + rel
	if err != nil {
		return
	}
	m, ok := w.find(h, cl)
	if m.Slot == index.None && name != builtin {
		d.Discard(name, cl.FileBytes()) // the entry went when the piece was not where the policy said
	}
	if !ok {
		return
	}
	s.Lock()
	if !s.Stands(m) {
		s.Unlock()
		return
	}
	e := s.Index.At(m.Slot)
	s.Moves.Stay(m.Slot) // else a policy that has forgotten it, because it leaves, would hear of a pin
	if s.Index.PinEntry(m.Slot, e) {
		s.Evictor.Post(abi.OpPin, m.Slot, e, m.Fingerprint, &evictor.Cause{
			Tenant: s.TenantOf(m.Slot), Time: d.Sequence.Clock(),
		})
	}
	had := e.Is(index.FallbackName)
	e.Set(index.FallbackName)
	s.Unlock()
	if name != builtin {
		err = d.Move(name, builtin)
	}
	if errors.Is(err, fs.ErrExist) || errors.Is(err, unix.ENOTDIR) {
		err = w.replace(name, builtin, h, cl)
	}
	s.Lock()
	if err != nil && !had {
		s.Index.At(m.Slot).Unset(index.FallbackName)
	}
	s.Unpin(m)
	s.Unlock()
	if name == builtin {
		return
	}
	if err != nil {
		w.skipped.Store(true)
		d.Log.Warn("a piece keeps the name of a place policy in quarantine", "file", name, "error", err)
		return
	}
	r.Count.Renamed.Add(1)
	w.renamed.Add(1)
}

// replace gives a piece its built-in name where something is in the way: the same piece, damage, or what the place
// policy made of the name, a directory or a file on the way to it.
func (w *renaming) replace(name, builtin string, h *pieceformat.Header, cl *catalog.Class) error {
	d := w.root.Kept
	there, info, err := d.Look(builtin)
	switch {
	case err == nil && cl.IsPiece(&there, &h.Key, h.Rank):
		claimed, err := d.Orphans.Claim(builtin, cl, &h.Key, h.Rank) // what stands there is the entry's from now on
		if err == nil {
			err = d.FS.Remove(name)
		}
		d.Orphans.Settle(claimed, err == nil)
		return err
	case info.IsDir() || errors.Is(err, unix.ENOTDIR):
		aside := d.Sequence.TempName(d.Slash + pieceformat.MetaDir + "/renamed")
		if err := d.FS.RenameNoReplace(name, aside); err != nil {
			return err
		}
		for dir := filepath.Dir(name); info.IsDir() && len(dir) >= len(builtin); dir = filepath.Dir(dir) {
			if err := d.FS.Remove(dir); err != nil { // another piece is in it: that one goes first
				return errors.Join(err, d.FS.RenameNoReplace(aside, name))
			}
		}
		if err := d.Move(aside, builtin); err != nil {
			return errors.Join(err, d.FS.RenameNoReplace(aside, name))
		}
		return nil
	case err != nil && pieceformat.IsDamage(err):
		d.Quarantine.Isolate(builtin, err)
		return d.Move(name, builtin)
	}
	return fmt.Errorf("store: %s is taken: %w", builtin, fs.ErrExist)
}
