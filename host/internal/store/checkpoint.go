package store

import (
	"errors"
	"fmt"
	"io"
	"io/fs"

	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// A checkpoint is the index of a root as it was when the store was closed in order. The next start uses it instead of a scan.
// Each entry keeps its slot, so that the state of the evict policy remains valid.
//
// A start removes the checkpoint durably before it changes anything. A checkpoint therefore exists only if no host has used the
// root since it was written. After a crash there is none, and a scan rebuilds the index. Changes by other programs are detected
// at a load, which verifies header and checksums. A checkpoint includes names that are not built-in ones.

// SampledEntries is the number of entries of a checkpoint that are compared with their files.
const SampledEntries = 64

// writeCheckpoint writes an index with the given descriptions of its owners.
func writeCheckpoint(f io.WriterAt, x *index.Index, when int64, owners []pieceformat.CheckpointOwner) error {
	head := pieceformat.Checkpoint{Time: when, High: x.High(), Clock: x.Clock(), Entries: x.Len()}
	return pieceformat.WriteCheckpoint(f, head, owners, func(yield func(*pieceformat.CheckpointEntry) bool) {
		var e pieceformat.CheckpointEntry
		for slot := range x.High() {
			if !x.At(slot).Is(index.Live) {
				continue
			}
			if e = x.Record(slot); !yield(&e) {
				return
			}
		}
	})
}

// owners describes the owners of entries, so that the next run can resolve them.
func (d *keptDir) owners(x *index.Index) []pieceformat.CheckpointOwner {
	owners := make([]pieceformat.CheckpointOwner, len(x.Owners()))
	has := make([]bool, len(owners))
	x.Each(func(_ uint32, e *index.Entry) { has[e.OwnerID()] = true })
	for i, o := range x.Owners() {
		if !has[i] {
			continue
		}
		cl := d.Catalog.Class(o.Class)
		owners[i] = pieceformat.CheckpointOwner{
			Namespace: cl.Namespace.Digest, Group: cl.Group, Tenant: d.Catalog.Tenants.Tenant(o.Tenant), TTL: cl.Namespace.TTL,
		}
	}
	return owners
}

// takeCheckpoint reads the checkpoint into an empty index and removes it. ok is false if there is no valid checkpoint, and then
// the index must not be used. An error means that the checkpoint could not be removed.
func (d *keptDir) takeCheckpoint(x *index.Index) (when int64, ok bool, err error) {
	var c pieceformat.Checkpoint
	err = d.Open(pieceformat.CheckpointFile, func(f staging.File, info staging.Info) (err error) {
		c, err = readCheckpoint(f, info.Size, x, d.owner)
		return err
	})
	if errors.Is(err, fs.ErrNotExist) {
		return 0, false, nil
	}
	if err == nil {
		err = d.checkSample(x)
	}
	if gone := d.removeCheckpoint(); gone != nil {
		return 0, false, gone
	}
	if err != nil {
		d.Log.Warn("checkpoint not used; the root is scanned", "error", err)
		return 0, false, nil
	}
	return c.Time, true, nil
}

// removeCheckpoint removes the checkpoint durably. It must be called before anything that the checkpoint describes is changed.
func (d *keptDir) removeCheckpoint() error {
	err := d.FS.Remove(d.Path + "/" + pieceformat.CheckpointFile)
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		err = d.FS.SyncDir(d.Path + "/" + pieceformat.MetaDir)
	}
	if err != nil {
		return fmt.Errorf("root %s: checkpoint not removed: %w", d.Path, err)
	}
	return nil
}

// readCheckpoint fills an empty index. After an error the index must not be used.
func readCheckpoint(f io.ReaderAt, size int64, x *index.Index,
	owner func(*pieceformat.CheckpointOwner) (index.Owner, error)) (pieceformat.Checkpoint, error) {
	l := &loader{x: x, owner: owner}
	c, err := pieceformat.ReadCheckpoint(f, size, l)
	if err != nil {
		return c, err
	}
	return c, l.restoring.End(c.Clock, c.High)
}

// loader enters a checkpoint into an index.
type loader struct {
	x         *index.Index
	restoring *index.Restoring
	ids       []uint32 // owner numbers of this run, by those of the checkpoint
	owner     func(*pieceformat.CheckpointOwner) (index.Owner, error)
}

func (l *loader) Head(c pieceformat.Checkpoint) error {
	if c.High > l.x.Max() {
		return fmt.Errorf("%w: checkpoint of %d slots, the root has %d now", pieceformat.ErrDamaged, c.High, l.x.Max())
	}
	l.restoring = l.x.Restore(int(c.Entries))
	return nil
}

func (l *loader) Owner(o *pieceformat.CheckpointOwner) error {
	id := index.None
	if *o != (pieceformat.CheckpointOwner{}) {
		owner, err := l.owner(o)
		if err != nil {
			return err
		}
		if n, ok := l.x.InternOwner(owner); ok {
			id = n
		}
	}
	l.ids = append(l.ids, id)
	return nil
}

func (l *loader) Entry(e *pieceformat.CheckpointEntry) error {
	e.OwnerID = l.ids[e.OwnerID]
	return l.restoring.Enter(e)
}

// owner returns the owner that a checkpoint describes.
func (d *keptDir) owner(o *pieceformat.CheckpointOwner) (index.Owner, error) {
	cl, err := d.Catalog.ClassFor(&pieceformat.Header{Namespace: o.Namespace, Group: o.Group})
	if err != nil {
		return index.Owner{}, err
	}
	if o.TTL != cl.Namespace.TTL {
		return index.Owner{}, fmt.Errorf("%w: namespace %s has another time to live now",
			pieceformat.ErrDamaged, o.Namespace)
	}
	return index.Owner{Class: cl.ID, Tenant: d.Catalog.Tenants.Number(o.Tenant)}, nil
}

// checkSample compares some entries with their files.
func (d *keptDir) checkSample(x *index.Index) error {
	n := max(1, x.High()/SampledEntries)
	for slot := n - 1; slot < x.High(); slot += n {
		e := x.At(slot)
		if !e.Is(index.Live) || x.Missing(slot) != 0 {
			continue
		}
		k := x.Key(slot)
		sum, err := d.allocated(d.Catalog.Class(x.Owner(slot).Class), &k, x.Pieces(slot), x.NamesOf(slot))
		if err != nil {
			return err
		}
		if sum != x.Bytes(slot) {
			return fmt.Errorf("%w: %s takes %d bytes, the checkpoint says %d", pieceformat.ErrDamaged, k, sum, x.Bytes(slot))
		}
	}
	return nil
}

// allocated returns the allocated bytes of the files of an entry's pieces.
func (d *keptDir) allocated(cl *catalog.Class, k *kv.Key, pieces uint64, named []pieceformat.Name) (sum int64, err error) {
	for rank := range entries.Ranks(pieces) {
		info, err := d.FS.Stat(d.Slash + cl.NameOf(named, k, rank))
		if err != nil {
			return 0, err
		}
		sum += pieceformat.Padded(info.Allocated)
	}
	return sum, nil
}
