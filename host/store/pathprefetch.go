package store

import (
	"slices"

	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/store/catalog"
)

// PathPrefetch is the keys that a caller is going to put, one after the other, with the same group, rank and ranks, so
// that the paths of their pieces are computed together. It is not safe for concurrent use.
type PathPrefetch struct {
	keys  []chunk.Key
	batch catalog.PathBatch
}

// PrefetchPaths makes a PathPrefetch. The keys must not change until the last is put.
func PrefetchPaths(keys []chunk.Key) *PathPrefetch { return &PathPrefetch{keys: keys} }

// path is the path of a put's piece, computed together with those of the next ones, or nil.
func (f *PathPrefetch) path(paths *catalog.Paths, p *Put) *catalog.PathQuery {
	if f == nil {
		return nil
	}
	if found := f.batch.Find(p.class, &p.key, p.rank); found != nil {
		return found
	}
	at := slices.Index(f.keys, p.key)
	if at < 0 {
		return nil
	}
	f.keys = f.keys[at:]
	f.batch.Reset()
	for ; len(f.keys) > 0 && !f.batch.Full(); f.keys = f.keys[1:] {
		f.batch.Add(catalog.PathQuery{Class: p.class, Key: f.keys[0], Rank: p.rank, Size: p.entryBytes()})
	}
	if f.batch.Len() < 2 {
		return nil
	}
	paths.Resolve(&f.batch)
	return f.batch.Find(p.class, &p.key, p.rank)
}
