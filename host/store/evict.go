package store

import (
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"math/bits"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/store/capacity"
	"github.com/kvhost/kvhost/host/store/catalog"
	"github.com/kvhost/kvhost/host/store/index"
	"github.com/kvhost/kvhost/host/store/pieceformat"
)

// evicted is what came of a round of eviction.
type evicted struct {
	entries int
	freed   int64 // bytes; an entry whose files could not be unlinked frees none
	failed  error // why a file could not be unlinked
}

// evictSome evicts entries that the policy names, up to the bytes wanted. The caller holds turn. reuseFor may get one
// of the files instead. Only entries of the tenant are evicted, if one is named.
func (r *root) evictSome(bytes int64, tenant uint32, reuseFor *Put) (got evicted) {
	r.mu.Lock()
	list := r.evicting[:0]
	r.evictor.Victims(bytes, tenant, func(slot uint32) { list = append(list, r.beginEvict(slot)) })
	r.evicting = list
	r.count.evictions += uint64(len(list))
	r.mu.Unlock()
	if len(list) == 0 {
		return got
	}
	for i := range list {
		v := &list[i]
		var err error
		if v.left, err = r.custody.unlink(v, r.offerFile(v, reuseFor)); err != nil && got.failed == nil {
			got.failed = err
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	got.entries = len(list)
	for i := range list {
		got.freed += max(0, r.x.Bytes(list[i].slot)-list[i].left)
		r.finishEvict(&list[i])
	}
	return got
}

// eviction is an entry that is being removed, with what its files' names are made of.
type eviction struct {
	slot     uint32
	class    *catalog.Class
	key      chunk.Key
	pieces   uint64
	fallback bool
	left     int64 // bytes of files that could not be unlinked
}

func ranksOf(pieces uint64) iter.Seq[uint32] {
	return func(yield func(uint32) bool) {
		for ; pieces != 0; pieces &= pieces - 1 {
			if !yield(uint32(bits.TrailingZeros64(pieces))) {
				return
			}
		}
	}
}

// beginEvict begins to remove an entry: the policy hears of it and lookups miss. finishEvict ends it, after the files
// are unlinked. The caller holds mu.
func (r *entries) beginEvict(slot uint32) eviction {
	e := r.x.At(slot)
	v := eviction{
		slot: slot, class: r.classOf(slot), key: r.x.Key(slot), pieces: r.x.Pieces(slot), fallback: e.Is(index.FallbackName),
	}
	announced := e.Is(index.Announced)
	e.Set(index.Evicting)
	e.Unset(index.Announced)
	if e.Is(index.Complete) {
		r.uncompleted(slot)
	}
	if r.scanning {
		r.removedDuringScan[r.x.Fingerprint(slot)] = struct{}{}
	}
	f := r.flights[slot]
	f.unlinking = true
	r.flights[slot] = f
	if announced { // else a scan has found it, and the policy does not know it yet
		r.evictor.Tell(abi.OpRemove, slot, r.x.Fingerprint(slot), 0)
	}
	return v
}

// cancelEvict takes beginEvict back, when no file of the entry was unlinked. The caller holds mu.
func (r *entries) cancelEvict(v *eviction) {
	e := r.x.At(v.slot)
	e.Unset(index.Evicting)
	if e.Is(index.Complete) {
		r.completed(v.slot, chunk.Root)
	}
	f := r.flights[v.slot]
	f.unlinking = false
	r.setFlight(v.slot, f)
	r.evictor.Announce(abi.OpResident, v.slot, r.x.Fingerprint(v.slot), 0)
}

// remove unlinks a file. When that fails, it says why and how many bytes are still taken (most, if nobody can tell),
// and the file becomes an orphan; the caller books its bytes. The error is [fs.ErrNotExist] when there was no file. An
// unlink can report an error although it happened, so the name is looked up again.
func (r *files) remove(name string, most int64) (left int64, err error) {
	if err = r.fs.Remove(name); err == nil || errors.Is(err, fs.ErrNotExist) {
		return 0, err
	}
	info, serr := r.fs.Stat(name)
	if errors.Is(serr, fs.ErrNotExist) {
		return 0, nil
	}
	if left = most; serr == nil {
		left = pieceformat.Padded(info.Allocated)
	}
	r.log.Error("file not unlinked; will retry, its bytes stay in the account", "file", name, "error", err)
	r.deferDelete(&orphan{name: name, bytes: left})
	return left, err
}

// locatePiece is the path of a published piece. Only an entry with a fallback can have one under the built-in name, and
// what stands under the other name may then be somebody else's: the header tells.
func (r *files) locatePiece(c *catalog.Class, k *chunk.Key, rank uint32, fallback bool) (string, error) {
	name, err := r.path(c, k, rank, false)
	switch {
	case err == nil:
		return r.locateAt(name, c, k, rank, fallback)
	case fallback:
		return r.path(c, k, rank, true)
	}
	return "", err
}

// locateAt is locatePiece with the place policy's name given.
func (r *files) locateAt(name string, c *catalog.Class, k *chunk.Key, rank uint32, fallback bool) (string, error) {
	if !fallback {
		return name, nil
	}
	h, herr := r.readHeader(name)
	if herr == nil && c.IsPiece(&h, k, rank) {
		return name, nil
	}
	builtin, err := r.path(c, k, rank, true)
	if err != nil || herr == nil || errors.Is(herr, fs.ErrNotExist) {
		return builtin, err
	}
	if pieceformat.IsDamage(herr) {
		if _, herr = r.fs.Stat(builtin); herr == nil {
			return builtin, nil
		} else if errors.Is(herr, fs.ErrNotExist) {
			return name, nil // it was this piece, or what is there is of no use to anybody
		}
	}
	return "", fmt.Errorf("store: cannot tell which of two candidate files holds rank %d of chunk %s: %w", rank, k, herr)
}

// finishEvict follows beginEvict once the entry's files are unlinked, but for left bytes of them. The caller holds mu.
func (r *entries) finishEvict(v *eviction) {
	n := min(v.left, r.x.Bytes(v.slot))
	r.x.Resize(v.slot, -n)
	r.account.Move(r.x.Owner(v.slot).Tenant, capacity.Orphans, n)
	f := r.flights[v.slot]
	f.unlinking = false
	r.setFlight(v.slot, f)
	r.reap(v.slot)
}

func (r *entries) setFlight(slot uint32, f flight) {
	if f == (flight{}) {
		delete(r.flights, slot)
		return
	}
	r.flights[slot] = f
}

// reap ends an evicted entry as far as it can be: out of the table when nothing happens to its files any more, and its
// bytes and slot free when nobody has a pin on it (unlinked files take space while they are open). The caller holds mu.
func (r *entries) reap(slot uint32) {
	e := r.x.At(slot)
	if !e.Is(index.Evicting) {
		return
	}
	if !e.Is(index.Detached) {
		if _, busy := r.flights[slot]; busy {
			return
		}
		r.x.Detach(slot)
		r.reaped.Broadcast()
	}
	if e.Pins() == 0 {
		r.account.Release(r.x.Owner(slot).Tenant, r.x.Bytes(slot))
		r.classOf(slot).Release()
		r.x.Release(slot)
		r.reaped.Broadcast()
	}
}

// drop removes an entry at once that is not, or no longer, what the index says. keep names ranks whose files the caller
// sees to. The caller does not hold mu.
func (r *root) drop(m mark, keep uint64) {
	r.mu.Lock()
	if !r.stands(m) {
		r.mu.Unlock()
		return
	}
	v := r.beginEvict(m.slot)
	r.mu.Unlock()
	v.left, _ = r.custody.unlink(&v, v.pieces&^keep)
	r.mu.Lock()
	r.finishEvict(&v)
	r.mu.Unlock()
}

// stands says whether a mark still names a live entry.
func (r *entries) stands(m mark) bool {
	if m.slot >= r.x.High() {
		return false
	}
	e := r.x.At(m.slot)
	return e.Is(index.Live) && !e.Is(index.Evicting) && r.x.Fingerprint(m.slot) == m.fp
}
