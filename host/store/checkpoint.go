package store

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/bits"
	"os"

	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/store/index"
	"github.com/kvhost/kvhost/host/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
)

// A checkpoint is a root's index as it was when the store was closed in order. The next start takes it instead of a scan,
// each entry in its old slot, so that what the evict policy kept of itself is right too.
//
// It is written only when the account is exact: nothing in flight, nothing leaving, no stray, the scan at the start
// finished, the root in use and not shared. And only when all that led to it is on disk: after a power failure names of
// files that were unlinked would come back, and be in nobody's account. The next start removes it, durably, before it changes anything. So it is
// there only if nobody has used the root since; after a crash there is none, and the scan rebuilds the index. What
// another program has changed meanwhile shows where it always does: a load compares header and checksums, and a file that
// is gone takes its entry with it. Names follow from the place policy, so a checkpoint holds only under the same one; and
// some files are looked at before the rest is believed.
const sampledEntries = 64

// unsettled says why the account is not exact, if it is not. mu is held.
func (r *root) unsettled() string {
	switch {
	case r.scanning:
		return "the scan at the start has not ended"
	case len(r.flights) > 0:
		return "entries are in flight"
	case r.account.Figures().Orphans != 0:
		return "files would not go"
	case !r.health.Serves():
		return "the root is out"
	}
	return ""
}

// saveCheckpoint writes the index, and what the evict policy keeps of itself, when the account is exact. Nothing else uses
// the root any more.
func (r *root) saveCheckpoint() {
	r.mu.Lock()
	defer r.mu.Unlock()
	why := r.unsettled()
	r.x.Each(func(_ uint32, e *index.Entry) {
		if e.Any(index.Evicting | index.Detached) {
			why = "entries are leaving"
		}
	})
	if why != "" {
		r.log.Info("no checkpoint is written; the next start scans", "because", why)
		return
	}
	when := r.store.stamp()
	err := r.fs.SyncFS(r.dir)
	if err == nil {
		err = r.saveState(when)
	}
	if err == nil {
		err = r.replaceMeta(pieceformat.CheckpointFile, func(f staging.File) error { return r.writeCheckpoint(f, when, r.checkpointOwners()) })
	}
	if err != nil {
		r.log.Warn("the checkpoint could not be written; the next start scans", "error", err)
	}
}

// replaceMeta writes one of the store's own files, durably.
func (r *files) replaceMeta(file string, write func(staging.File) error) error {
	name := r.dir + "/" + file
	temp := r.store.tempName(name)
	f, err := r.fs.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	if err = write(f); err == nil {
		err = f.Datasync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = r.fs.Rename(temp, name)
	}
	if err != nil {
		_ = r.fs.Remove(temp)
		return err
	}
	return r.fs.SyncDir(r.dir + "/" + pieceformat.MetaDir)
}

func (r *root) writeCheckpoint(f io.WriterAt, when int64, owners []pieceformat.CheckpointOwner) error {
	x := r.x
	head := pieceformat.Checkpoint{Time: when, High: x.High(), Clock: x.Clock(), Entries: x.Len()}
	return pieceformat.WriteCheckpoint(f, head, owners, func(yield func(*pieceformat.CheckpointEntry) bool) {
		for slot := range x.High() {
			if !x.At(slot).Is(index.Live) {
				continue
			}
			e := pieceformat.CheckpointEntry(x.Record(slot))
			if !yield(&e) {
				return
			}
		}
	})
}

// The state bits of the index and of a checkpoint are the same.
var _ [index.RecordState]struct{} = [pieceformat.StateComplete | pieceformat.StateFallbackName]struct{}{}

// checkpointOwners are the owners in terms that the next run can resolve.
func (r *root) checkpointOwners() []pieceformat.CheckpointOwner {
	owners := make([]pieceformat.CheckpointOwner, len(r.x.Owners()))
	has := make([]bool, len(owners))
	r.x.Each(func(_ uint32, e *index.Entry) { has[e.OwnerID()] = true })
	for i, o := range r.x.Owners() {
		if !has[i] {
			continue
		}
		c := r.store.catalog.Class(o.Class)
		owners[i] = pieceformat.CheckpointOwner{
			Namespace: c.Namespace.Digest, Group: c.Group, Tenant: r.store.catalog.Tenants.Tenant(o.Tenant), TTL: c.Namespace.TTL,
			Place: c.Place.Identity(),
		}
	}
	return owners
}

// takeCheckpoint reads the checkpoint into the index, if there is one to go by, and removes it. An error says that it could
// not be removed.
func (r *root) takeCheckpoint() (*pieceformat.Checkpoint, error) {
	name := r.dir + "/" + pieceformat.CheckpointFile
	f, err := r.fs.OpenFile(name, os.O_RDONLY, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	x := index.New(r.cfg.MaxEntries, r.store.catalog.Fingerprint, r.store.catalog.Base)
	var c pieceformat.Checkpoint
	if err == nil {
		c, err = r.readCheckpoint(x, f)
		err = errors.Join(err, f.Close())
	}
	if err == nil {
		err = r.checkSample(x)
	}
	if gone := r.removeCheckpoint(); gone != nil {
		return nil, gone
	}
	if err != nil {
		r.log.Warn("the checkpoint is not used; the root is scanned", "error", err)
		return nil, nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.x = x
	r.evictor.SetIndex(x)
	x.Each(func(slot uint32, e *index.Entry) {
		r.classOf(slot).Ref()
		r.account.Commit(x.Owner(slot).Tenant, x.Bytes(slot))
		if e.Is(index.Complete) {
			r.complete++
		}
		r.count.recovered += uint64(bits.OnesCount64(x.Pieces(slot)))
	})
	r.store.stampsFrom(c.Time)
	return &c, nil
}

// removeCheckpoint does so durably, before anything changes that it tells of.
func (r *root) removeCheckpoint() error {
	err := r.fs.Remove(r.dir + "/" + pieceformat.CheckpointFile)
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		err = r.fs.SyncDir(r.dir + "/" + pieceformat.MetaDir)
	}
	if err != nil {
		return fmt.Errorf("store: root %s: a checkpoint that must go: %w", r.dir, err)
	}
	return nil
}

// readCheckpoint fills an empty index. After an error it is of no use.
func (r *root) readCheckpoint(x *index.Index, f staging.File) (pieceformat.Checkpoint, error) {
	info, err := f.Stat()
	if err != nil {
		return pieceformat.Checkpoint{}, err
	}
	l := &checkpointLoader{x: x, ownerFor: r.store.ownerFor}
	return l.load(f, info.Size)
}

// checkpointLoader enters a checkpoint into an index.
type checkpointLoader struct {
	x        *index.Index
	owners   []uint32 // numbers of this run by those of the checkpoint
	ownerFor func(*pieceformat.CheckpointOwner) (index.Owner, error)
}

func (l *checkpointLoader) load(f io.ReaderAt, size int64) (pieceformat.Checkpoint, error) {
	c, err := pieceformat.ReadCheckpoint(f, size, l)
	if err == nil {
		l.x.EndRestore(c.Clock, c.High)
	}
	return c, err
}

func (l *checkpointLoader) Head(c pieceformat.Checkpoint) error {
	if c.High > l.x.Max() {
		return fmt.Errorf("%w: checkpoint of %d slots, the root has %d now", pieceformat.ErrDamaged, c.High, l.x.Max())
	}
	l.x.Reserve(int(c.Entries))
	return nil
}

func (l *checkpointLoader) Owner(o *pieceformat.CheckpointOwner) error {
	id := index.None
	if *o != (pieceformat.CheckpointOwner{}) {
		owner, err := l.ownerFor(o)
		if err != nil {
			return err
		}
		if n, ok := l.x.InternOwner(owner); ok {
			id = n
		}
	}
	l.owners = append(l.owners, id)
	return nil
}

func (l *checkpointLoader) Entry(e *pieceformat.CheckpointEntry) error {
	rec := index.Record(*e)
	rec.OwnerID = l.owners[e.OwnerID]
	return l.x.Restore(&rec)
}

// ownerFor finds the owner that a checkpoint names.
func (s *Store) ownerFor(o *pieceformat.CheckpointOwner) (index.Owner, error) {
	cl, err := s.catalog.ClassFor(&pieceformat.Header{Namespace: o.Namespace, Group: o.Group})
	if err != nil {
		return index.Owner{}, err
	}
	if cl.Place.Identity() != o.Place {
		if cl, err = s.catalog.ClassNamed(cl, o.Place); err != nil {
			return index.Owner{}, err
		}
	}
	if cl == nil || o.TTL != cl.Namespace.TTL {
		return index.Owner{}, fmt.Errorf("%w: namespace %s has another place policy or time to live now", pieceformat.ErrDamaged, o.Namespace)
	}
	return index.Owner{Class: cl.ID, Tenant: s.catalog.Tenants.Number(o.Tenant)}, nil
}

// checkSample compares some entries of a checkpoint with their files.
func (r *root) checkSample(x *index.Index) error {
	n := max(1, x.High()/sampledEntries)
	for slot := n - 1; slot < x.High(); slot += n {
		e := x.At(slot)
		if !e.Is(index.Live) || e.Is(index.FallbackName) || x.Missing(slot) != 0 {
			continue
		}
		k, sum := x.Key(slot), int64(0)
		for rank := range uint32(chunk.MaxRanks) {
			if x.Pieces(slot)&(1<<rank) == 0 {
				continue
			}
			name, err := r.path(r.store.catalog.Class(x.Owner(slot).Class), &k, rank, false)
			if err != nil {
				return err
			}
			info, err := r.fs.Stat(name)
			if err != nil {
				return err
			}
			sum += pieceformat.Padded(info.Allocated)
		}
		if sum != x.Bytes(slot) {
			return fmt.Errorf("%w: %s takes %d bytes, the checkpoint says %d", pieceformat.ErrDamaged, k, sum, x.Bytes(slot))
		}
	}
	return nil
}
