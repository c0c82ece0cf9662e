package catalog

import (
	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/policy"
)

// PathBatch caches the paths of pieces that will be needed soon: the puts of a request, the loads of a lease, the next
// victims. A call of a WebAssembly policy costs as much as computing a path, so the paths of a batch are asked for
// together. A path stays right, because it follows from the piece and its class. It is not safe for concurrent use.
type PathBatch struct {
	queries []PathQuery
	at      int // where the next is most likely
}

// BatchSize is the most paths in a batch. They are asked for in several calls, of which the first warms the caches.
const BatchSize = 4 * policy.MaxPaths

// PathQuery is a piece, and its path.
type PathQuery struct {
	Class  *Class
	Prefix string // of the path
	Key    chunk.Key
	Rank   uint32
	Size   int64
	Root   uint32 // that the policy chose, or index.None
	Path   string // empty: it was not asked for, or the policy failed
}

func (q *PathQuery) record() abi.PlaceQuery {
	return abi.PlaceQuery{
		Namespace: q.Class.Namespace.ID, Group: q.Class.Group, Rank: q.Rank, KeyLen: q.Class.Namespace.KeyLen,
		Size: uint32(q.Size / abi.SizeUnit), Key: q.Key,
	}
}

// Len is the number of pieces.
func (b *PathBatch) Len() int { return len(b.queries) }

// Reset empties the batch.
func (b *PathBatch) Reset() { b.queries = b.queries[:0] }

// Full says whether Add would do nothing.
func (b *PathBatch) Full() bool { return len(b.queries) >= BatchSize }

// Add adds a piece, if the batch is not full.
func (b *PathBatch) Add(q PathQuery) {
	if !b.Full() {
		b.queries = append(b.queries, q)
	}
}

// Find returns a piece that has a path, or nil.
func (b *PathBatch) Find(cl *Class, key *chunk.Key, rank uint32) *PathQuery {
	for range b.queries {
		if b.at >= len(b.queries) {
			b.at = 0
		}
		if q := &b.queries[b.at]; q.Rank == rank && q.Class == cl && q.Key == *key {
			if q.Path == "" {
				return nil
			}
			return q
		}
		b.at++
	}
	return nil
}

// Path is the path of a piece, or empty.
func (b *PathBatch) Path(cl *Class, key *chunk.Key, rank uint32) string {
	if q := b.Find(cl, key, rank); q != nil {
		return q.Path
	}
	return ""
}

// Take is Path, and removes the piece.
func (b *PathBatch) Take(cl *Class, key *chunk.Key, rank uint32) string {
	path := b.Path(cl, key, rank)
	if path != "" {
		last := len(b.queries) - 1
		b.queries[b.at], b.queries[last] = b.queries[last], PathQuery{}
		b.queries = b.queries[:last]
	}
	return path
}

// Resolve asks for the paths of all pieces in a batch. A piece that gets no path is asked for by itself when it is
// needed, and the policy's fault is reported then. Policies in quarantine are not asked: of most of their pieces they
// need not be.
func (p *Paths) Resolve(b *PathBatch) {
	w := p.work.Get().(*pathWork)
	defer p.work.Put(w)
	b.at = 0
	for rest := b.queries; len(rest) > 0; rest = rest[len(w.queries):] {
		place := rest[0].Class.Place.Policy
		w.queries = w.queries[:0]
		for i := range rest {
			if rest[i].Class.Place.Policy != place {
				break
			}
			w.queries = append(w.queries, rest[i].record())
		}
		if place.Quarantined() {
			continue
		}
		_ = place.Paths(w.queries, &w.names)
		w.path = w.path[:0]
		for i := range w.names.Len() {
			w.path = append(append(w.path, rest[i].Prefix...), w.names.Path(i)...)
		}
		text := string(w.path)
		for i := range w.names.Len() {
			q := &rest[i]
			size := len(q.Prefix) + len(w.names.Path(i))
			q.Path, q.Root, text = text[:size], w.names.Root(i), text[size:]
		}
	}
}
