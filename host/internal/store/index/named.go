package index

import (
	"slices"

	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
)

// AddName notes a name of an entry's piece. It is false when the piece has it already.
func (x *Index) AddName(slot uint32, n pieceformat.Name) bool {
	key, e := x.Key(slot), x.At(slot)
	if e.Is(Named) && slices.Contains(x.Names.List(slot, &key), n) {
		return false
	}
	x.Names.Add(slot, &key, n)
	e.Set(Named)
	return true
}

// HasName says whether a piece that is there has a name, which is empty for the built-in one.
func (x *Index) HasName(slot, rank uint32, path string) bool {
	list := x.NamesOf(slot)
	if path != "" {
		return slices.Contains(list, pieceformat.Name{Rank: rank, Path: path})
	}
	_, named := pieceformat.NameOf(list, rank)
	return !named
}

// Rename gives a piece one name in place of all that it has: empty for the built-in one.
func (x *Index) Rename(slot, rank uint32, path string) {
	list := x.NamesOf(slot)
	x.Names.Remove(slot)
	x.At(slot).Unset(Named)
	for _, n := range list {
		if n.Rank != rank {
			x.AddName(slot, n)
		}
	}
	if path != "" {
		x.AddName(slot, pieceformat.Name{Rank: rank, Path: path})
	}
}

// NameOf is the name of a piece, empty for the built-in one.
func (x *Index) NameOf(slot, rank uint32) string {
	var room [pieceformat.MaxPath]byte
	key := x.Key(slot)
	path, _ := x.Names.appendPath(room[:0], slot, &key, rank)
	return string(path)
}

// NamesOf are the names of an entry's pieces that have another one than the built-in.
func (x *Index) NamesOf(slot uint32) []pieceformat.Name {
	if !x.At(slot).Is(Named) {
		return nil
	}
	key := x.Key(slot)
	return x.Names.List(slot, &key)
}
