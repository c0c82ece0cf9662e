package catalog

import (
	"slices"

	"github.com/kvhost/kvhost/host/chunk"
)

// PathPrefetch is the keys that a caller is going to put, one after the other, with the same group, rank and ranks, so
// that the paths of their pieces are computed together. It is not safe for concurrent use.
type PathPrefetch struct {
	keys  []chunk.Key
	batch PathBatch
}

// PrefetchPaths makes a PathPrefetch. The keys must not change until the last is put.
func PrefetchPaths(keys []chunk.Key) *PathPrefetch { return &PathPrefetch{keys: keys} }

// Path is the path of a put's piece, computed together with those of the next ones, or nil.
func (f *PathPrefetch) Path(paths *Paths, q PathQuery) *PathQuery {
	if f == nil {
		return nil
	}
	if found := f.batch.Find(q.Class, &q.Key, q.Rank); found != nil {
		return found
	}
	at := slices.Index(f.keys, q.Key)
	if at < 0 {
		return nil
	}
	f.keys = f.keys[at:]
	f.batch.Reset()
	for next := q; len(f.keys) > 0 && !f.batch.Full(); f.keys = f.keys[1:] {
		next.Key = f.keys[0]
		f.batch.Add(next)
	}
	if f.batch.Len() < 2 {
		return nil
	}
	paths.Resolve(&f.batch)
	return f.batch.Find(q.Class, &q.Key, q.Rank)
}
