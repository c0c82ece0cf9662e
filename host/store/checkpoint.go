package store

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"math/bits"
	"os"

	"github.com/kvhost/kvhost/host/chunk"
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
const (
	checkpointFile = metaDir + "/index"
	lookedAt       = 64 // files
)

// unsettled says why the account is not exact, if it is not. mu is held.
func (r *root) unsettled() string {
	switch {
	case r.cfg.Shared:
		return "the root is shared"
	case r.scanning:
		return "the scan at the start has not ended"
	case len(r.flights) > 0:
		return "entries are in flight"
	case r.stray != 0:
		return "files would not go"
	case !r.serving():
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
	r.x.each(func(_ uint32, e *entry) {
		if e.any(stLeaving | stDetached) {
			why = "entries are leaving"
		}
	})
	if why != "" {
		r.log.Info("no checkpoint is written; the next start scans", "because", why)
		return
	}
	c := checkpoint{when: r.store.stamp(), high: r.x.high, clock: r.x.clock, entries: r.x.used, owners: uint32(len(r.x.owners.list))}
	err := r.fs.SyncFS(r.dir)
	if err == nil {
		err = r.saveState(c.when)
	}
	if err == nil {
		err = r.replaceMeta(checkpointFile, func(f staging.File) error { return r.x.writeCheckpoint(f, c, r.ownerRecords(), &r.expiries) })
	}
	if err != nil {
		r.log.Warn("the checkpoint could not be written; the next start scans", "error", err)
	}
}

// replaceMeta writes one of the store's own files, durably.
func (r *root) replaceMeta(file string, write func(staging.File) error) error {
	name := r.dir + "/" + file
	temp := tempName(name, r.store.cfg.HostID, r.store.seq.Add(1))
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
	return r.fs.SyncDir(r.dir + "/" + metaDir)
}

// ownerRecords are the owners in the words of the next run: namespace, group, tenant, time to live, naming. One that has no
// entries any more is all zero.
func (r *root) ownerRecords() []byte {
	has := make([]bool, len(r.x.owners.list))
	r.x.each(func(_ uint32, e *entry) { has[e.owner()] = true })
	b := make([]byte, 0, len(r.x.owners.list)*ownerRecord)
	for i, o := range r.x.owners.list {
		var rec [ownerRecord]byte
		if !has[i] {
			b = append(b, rec[:]...)
			continue
		}
		c := r.store.spaces.class(o.class)
		copy(rec[:16], c.ns.digest[:])
		binary.LittleEndian.PutUint32(rec[16:], c.group)
		binary.LittleEndian.PutUint32(rec[20:], r.store.spaces.tenantOf(o.tenant))
		binary.LittleEndian.PutUint64(rec[24:], uint64(c.ns.ttl))
		copy(rec[32:], c.names.identity())
		b = append(b, rec[:]...)
	}
	return b
}

// takeCheckpoint reads the checkpoint into the index, if there is one to go by, and removes it. An error says that it could
// not be removed.
func (r *root) takeCheckpoint() (*checkpoint, error) {
	name := r.dir + "/" + checkpointFile
	f, err := r.fs.OpenFile(name, os.O_RDONLY, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	x := newIndex(r.cfg.MaxEntries, r.store.spaces.print, r.store.spaces.base)
	var c checkpoint
	var ends expiries
	if err == nil {
		c, err = r.readCheckpoint(x, f, &ends)
		err = errors.Join(err, f.Close())
	}
	if err == nil {
		err = r.lookAt(x)
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
	r.x, r.expiries = x, ends
	x.each(func(slot uint32, e *entry) {
		r.classOf(slot).refs.Add(1)
		r.used += x.bytes(slot)
		r.bill(slot, x.bytes(slot))
		if e.is(stComplete) {
			r.complete++
		}
		r.count.recovered += uint64(bits.OnesCount64(x.pieces(slot)))
	})
	r.store.stampsFrom(c.when)
	return &c, nil
}

// removeCheckpoint does so durably, before anything changes that it tells of.
func (r *root) removeCheckpoint() error {
	err := r.fs.Remove(r.dir + "/" + checkpointFile)
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		err = r.fs.SyncDir(r.dir + "/" + metaDir)
	}
	if err != nil {
		return fmt.Errorf("store: root %s: a checkpoint that must go: %w", r.dir, err)
	}
	return nil
}

func (r *root) readCheckpoint(x *index, f staging.File, ends *expiries) (checkpoint, error) {
	info, err := f.Stat()
	if err != nil {
		return checkpoint{}, err
	}
	return x.readCheckpoint(f, info.Size, ends, r.store.ownerFor)
}

// ownerFor finds the owner that a record names.
func (s *Store) ownerFor(rec []byte) (owner, error) {
	cl, err := s.classFor(&Header{Namespace: chunk.Digest(rec[:16]), Group: binary.LittleEndian.Uint32(rec[16:])})
	if err != nil {
		return owner{}, err
	}
	if string(cl.names.identity()) != string(rec[32:ownerRecord]) {
		if cl, err = s.classNamed(cl, rec[32:ownerRecord]); err != nil {
			return owner{}, err
		}
	}
	if cl == nil || binary.LittleEndian.Uint64(rec[24:]) != uint64(cl.ns.ttl) {
		return owner{}, fmt.Errorf("%w: namespace %x has another place policy or time to live now", ErrDamaged, rec[:16])
	}
	tenant, err := s.spaces.internTenant(binary.LittleEndian.Uint32(rec[20:]))
	return owner{cl.id, tenant}, err
}

// lookAt compares some entries of a checkpoint with their files.
func (r *root) lookAt(x *index) error {
	n := max(1, x.high/lookedAt)
	for slot := n - 1; slot < x.high; slot += n {
		e := x.at(slot)
		if !e.is(stLive) || e.is(stDetour) || x.owed[slot] != 0 {
			continue
		}
		k, sum := x.key(slot), int64(0)
		for rank := range uint32(chunk.MaxRanks) {
			if x.pieces(slot)&(1<<rank) == 0 {
				continue
			}
			name, err := r.path(r.store.spaces.class(x.ownerOf(slot).class), &k, rank, false)
			if err != nil {
				return err
			}
			info, err := r.fs.Stat(name)
			if err != nil {
				return err
			}
			sum += padded(info.Allocated)
		}
		if sum != x.bytes(slot) {
			return fmt.Errorf("%w: %s takes %d bytes, the checkpoint says %d", ErrDamaged, k, sum, x.bytes(slot))
		}
	}
	return nil
}
