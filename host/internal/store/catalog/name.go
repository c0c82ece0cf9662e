package catalog

import (
	"errors"
	"fmt"
	"sync"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
)

// AppendBuiltin appends the built-in name of a piece: its path below the root.
func (cl *Class) AppendBuiltin(dst []byte, key *kv.Key, rank uint32) []byte {
	return pieceformat.AppendBuiltin(dst, cl.Namespace.Digest, cl.Namespace.KeyLen, key, cl.Group, rank)
}

// Builtin is the built-in name of a piece.
func (cl *Class) Builtin(key *kv.Key, rank uint32) string {
	var room [builtinRoom]byte
	return string(cl.AppendBuiltin(room[:0], key, rank))
}

// NameOf is the name of a piece, given those of its entry that are not built-in ones.
func (cl *Class) NameOf(list []pieceformat.Name, key *kv.Key, rank uint32) string {
	if path, ok := pieceformat.NameOf(list, rank); ok {
		return path
	}
	return cl.Builtin(key, rank)
}

// builtinRoom is room for a built-in name.
const builtinRoom = 160

// asking is the memory of one call of a place policy.
type asking struct {
	query abi.PlaceQuery
	path  []byte
}

var askings = sync.Pool{New: func() any { return &asking{path: make([]byte, 0, pieceformat.MaxPath)} }}

// Ask asks the namespace's place policy to name a piece that is about to be stored, of an entry of so many bytes. The name
// is empty where the piece gets the built-in one, which it does with every error, too. root is the one that the policy
// chose, or [abi.None]. The answer is a fact of the piece from then on: the policy is not asked again.
func (cl *Class) Ask(key *kv.Key, rank uint32, size int64) (name string, root uint32, err error) {
	w := askings.Get().(*asking)
	defer askings.Put(w)
	ns := cl.Namespace
	w.query = abi.PlaceQuery{
		Namespace: ns.ID, Group: cl.Group, Rank: rank, KeyLen: ns.KeyLen, Size: uint32(size / abi.SizeUnit), Key: *key,
	}
	for {
		p := ns.Place.Now()
		w.path, root, err = p.Policy.Path(&w.query, w.path[:0])
		if !errors.Is(err, policy.ErrClosed) || ns.Place.Now() == p {
			break // else its successor is asked
		}
	}
	if err != nil || len(w.path) == 0 {
		return "", root, err
	}
	var room [builtinRoom]byte
	switch {
	case string(w.path) == string(cl.AppendBuiltin(room[:0], key, rank)):
		return "", root, nil
	case pieceformat.Reserved(w.path):
		err := fmt.Errorf("%w: it gave the path %q, where built-in names of pieces are", policy.ErrFault, w.path)
		ns.Place.Now().Policy.Misnamed(err)
		return "", root, err
	}
	return string(w.path), root, nil
}
