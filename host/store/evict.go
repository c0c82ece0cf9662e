package store

import (
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"math/bits"

	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/store/catalog"
	"github.com/kvhost/kvhost/host/store/entries"
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
	r.Lock()
	list := r.evicting[:0]
	r.Evictor.Victims(bytes, tenant, func(slot uint32) { list = append(list, r.BeginEvict(slot)) })
	r.evicting = list
	r.Count.Evictions += uint64(len(list))
	r.Unlock()
	if len(list) == 0 {
		return got
	}
	for i := range list {
		v := &list[i]
		var err error
		if v.Left, err = r.custody.unlink(v, r.offerFile(v, reuseFor)); err != nil && got.failed == nil {
			got.failed = err
		}
	}
	r.Lock()
	defer r.Unlock()
	got.entries = len(list)
	for i := range list {
		got.freed += max(0, r.Index.Bytes(list[i].Slot)-list[i].Left)
		r.FinishEvict(&list[i])
	}
	return got
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

// drop removes an entry at once that is not, or no longer, what the index says. keep names ranks whose files the caller
// sees to. The caller does not hold mu.
func (r *root) drop(m entries.Mark, keep uint64) {
	r.Lock()
	if !r.Stands(m) {
		r.Unlock()
		return
	}
	v := r.BeginEvict(m.Slot)
	r.Unlock()
	v.Left, _ = r.custody.unlink(&v, v.Pieces&^keep)
	r.Lock()
	r.FinishEvict(&v)
	r.Unlock()
}
