package store

import (
	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/store/catalog"
	"github.com/kvhost/kvhost/host/store/entries"
)

// victimPaths are the paths of victims' pieces, and of those that are queued behind them. A put evicts one entry,
// mostly, and a call of a place policy for one path costs nearly as much as for many. It is used by the holder of turn.
type victimPaths struct {
	root  *root
	batch catalog.PathBatch
}

// collect begins a batch with the pieces of evicted entries, if the first is not in the batch that there is. The
// entries that are expected to follow are added when next is given, which needs the root's lock.
func (p *victimPaths) collect(list []entries.Eviction, next func(visit func(slot uint32) bool)) (fresh bool) {
	if p.of(&list[0]) {
		return false
	}
	p.batch.Reset()
	for i := range list {
		if p.batch.Full() {
			break
		}
		p.add(list[i].Class, list[i].Key, list[i].Pieces)
	}
	if next != nil {
		next(func(slot uint32) bool {
			p.add(p.root.ClassOf(slot), p.root.Index.Key(slot), p.root.Index.Pieces(slot))
			return !p.batch.Full()
		})
	}
	return p.batch.Len() > 1
}

func (p *victimPaths) add(cl *catalog.Class, key chunk.Key, pieces uint64) {
	for rank := range entries.Ranks(pieces) {
		p.batch.Add(catalog.PathQuery{Class: cl, Prefix: p.root.Slash, Key: key, Rank: rank})
	}
}

// of says whether the batch has the paths of all pieces of an evicted entry.
func (p *victimPaths) of(v *entries.Eviction) bool {
	for rank := range entries.Ranks(v.Pieces) {
		if p.batch.Path(v.Class, &v.Key, rank) == "" {
			return false
		}
	}
	return true
}

// locateVictim is the path of an evicted entry's piece.
func (r *root) locateVictim(v *entries.Eviction, rank uint32) (string, error) {
	name := ""
	if v.Paths != nil {
		name = v.Paths.Path(v.Class, &v.Key, rank)
	}
	return r.LocateAt(name, v.Class, &v.Key, rank, v.FallbackName)
}
